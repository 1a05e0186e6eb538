"""The examples of bounded weights run, and their results agree with the documentation."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_bounded_weights(capsys: pytest.CaptureFixture[str]) -> None:
    load("lipschitz").main(["--quick"])
    printed = capsys.readouterr().out
    assert "2.weight: one example moves its sum by at most" in printed
    assert "test accuracy of the averaged weights" in printed and "epsilon=" in printed


@pytest.mark.slow
def test_the_bias_of_clipped_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    example = load("clipping_bias")
    assert example.biased_point() == pytest.approx((-0.01765, -0.94221), abs=5e-6)
    assert float((example.average_gradient((0, 0), clipped=False) ** 2).sum()) < 1e-12
    example.main(["--epochs", "8"])
    clipped, bounded = (
        [float(n) for n in re.findall(r"-?\d\.\d{3}", line)] for line in capsys.readouterr().out.splitlines()[1:]
    )
    assert clipped[1] < -0.7 and abs(bounded[1]) < 0.3
