"""Norms and sums run in IEEE arithmetic under any user settings, and the settings are restored."""

from __future__ import annotations

import pytest
import torch

from clipwise.gradients.precision import ieee_arithmetic


@pytest.fixture(autouse=True)
def _same_switches_afterwards() -> object:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_the_common_switch(precision: str) -> None:
    torch.set_float32_matmul_precision(precision)
    with ieee_arithmetic():
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == precision


def test_the_switch_is_restored_after_an_error() -> None:
    torch.set_float32_matmul_precision("high")
    with pytest.raises(ZeroDivisionError), ieee_arithmetic():
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == "high"


def test_no_autocast() -> None:
    a = torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
        with ieee_arithmetic():
            assert (a @ a).dtype == torch.float32
        assert (a @ a).dtype == torch.bfloat16


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="this torch has one switch only")
def test_the_switches_of_single_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once they are used, reading the common switch raises an error in torch."""

    def refuse() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    with monkeypatch.context() as patched:
        patched.setattr(torch, "get_float32_matmul_precision", refuse)
        with ieee_arithmetic():
            assert products.fp32_precision == "ieee"
            assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
        assert products.fp32_precision == before
