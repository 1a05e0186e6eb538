"""`clipwise noise`: the computed noise, length or batch size fits the budget tightly."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from clipwise import accounting
from tests.cli.calls import clipwise, figure, refused

DATA = ["--dataset-size", 1000]


def test_least_noise() -> None:
    run: dict[str, Any] = {"sample_rate": 0.05, "steps": 200, "delta": 1e-5}
    result = clipwise("noise", "--epsilon", 2, "--batch-size", 50, *DATA, "--epochs", 10)
    assert "200 steps" in result.stdout
    noise = figure(result, "Least noise: a multiplier of")
    assert accounting.epsilon(noise_multiplier=noise, **run) <= figure(result, "PLD") <= 2
    assert accounting.epsilon(noise_multiplier=0.998 * noise, **run) > 2


@pytest.mark.parametrize("sampling", ["poisson", "fixed-size", "shuffled", "partition"])
def test_most_steps(sampling: str) -> None:
    options = ["--noise-multiplier", 2, "--batch-size", 50, *DATA, "--sampling", sampling]
    result = clipwise("noise", "--epsilon", 2, *options)
    steps = int(figure(result, "Most steps:"))
    assert figure(result, "PLD") <= 2
    more = clipwise("epsilon", *options, "--steps", steps + 1)
    assert figure(more, "PLD") > 2


def test_largest_rate_and_batch() -> None:
    options = ["--noise-multiplier", 2, "--steps", 300]
    result = clipwise("noise", "--epsilon", 2, *options)
    rate = figure(result, "a rate of")
    assert figure(result, "PLD") <= 2
    assert accounting.epsilon(noise_multiplier=2, sample_rate=1.01 * rate, steps=300, delta=1e-5) > 2
    whole = clipwise("noise", "--epsilon", 2, *options, *DATA)
    size = int(figure(whole, "Largest batches:"))
    assert figure(whole, "PLD") <= 2
    more = clipwise("epsilon", *options, *DATA, "--batch-size", size + 1)
    assert figure(more, "PLD") > 2


def test_largest_batch_for_given_epochs() -> None:
    result = clipwise("noise", "--epsilon", 2, "--noise-multiplier", 2, "--epochs", 10, *DATA)
    assert figure(result, "PLD") <= 2
    size = int(figure(result, "Largest batches:"))
    assert re.search(r"^\d+ steps", result.stdout) and size >= 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--epsilon", -1, "--sample-rate", 0.1, "--steps", 10], ["epsilon"]),
        (["--epsilon", 1, "--steps", 10], ["--sample-rate", "--noise-multiplier"]),
        (["--epsilon", 1, "--noise-multiplier", 1], ["--steps", "--sample-rate"]),
        (
            ["--epsilon", 1, "--noise-multiplier", 1, "--sample-rate", 0.1, "--steps", 10],
            ["leave out", "clipwise epsilon"],
        ),
        (["--epsilon", 1, "--noise-multiplier", 1, "--steps", 9, "--sampling", "shuffled"], ["shuffled"]),
        (["--epsilon", 1, "--noise-multiplier", 1, "--steps", 9, "--epochs", 1], ["--epochs", "--steps"]),
        (["--epsilon", 0.1, "--noise-multiplier", 0.3, "--steps", 10**6, *DATA], ["epsilon"]),
        (["--epsilon", 0.1, "--noise-multiplier", 0.3, "--sampling", "full"], ["epsilon"]),
    ],
)
def test_what_it_refuses(options: list[Any], words: list[str]) -> None:
    refused(clipwise("noise", *options), *words)


def test_it_plots_the_run_that_it_found(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ["--epsilon", 2, "--batch-size", 50, *DATA, "--epochs", 10]
    assert clipwise("noise", *options, "--plot", tmp_path / "a.svg").exit_code == 0
    assert "<svg" in (tmp_path / "a.svg").read_text()
    refused(clipwise("noise", *options, "--plot", tmp_path / "a.pdf"), ".png", ".svg")
