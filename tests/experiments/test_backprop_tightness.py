"""No bound is below a gradient, in any kind of layer; where a norm is exact, the ratio is 1."""

import pytest
import torch

from experiments import models
from experiments.backprop_clipping import tightness


@pytest.mark.parametrize("bound", ["gradient", "upstream"])
@pytest.mark.parametrize("kind", tightness.KINDS)
def test_no_bound_is_below_a_gradient(kind: str, bound: str) -> None:
    for parameter, values in tightness.ratios_of_kind(kind, bound, examples=3, seed=0).items():
        assert len(values) == 3 and min(values) >= 1 - 1e-6, parameter
        if "bias" in parameter or "Norm" in kind:
            assert max(values) <= 1 + 1e-6, parameter


def test_bounds_of_the_papers_networks_are_in_their_order() -> None:
    torch.manual_seed(0)
    model = models.build("backprop_mnist", padding=True, bias=True)
    x, y = tightness.images("mnist", None, 3)
    for layer, found in tightness.ratios(model, x, y).items():
        for windows, upstream in zip(found["windows"], found["upstream"], strict=True):
            assert 1 - 1e-6 <= windows <= upstream * (1 + 1e-6), layer


def test_the_page_states_how_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tightness, "NETWORKS", {"digits": ("mnist", "backprop_mnist", {})})
    monkeypatch.setattr(tightness, "KINDS", {"Linear": tightness.KINDS["Linear"]})
    text = tightness.page(None, examples=2, seed=3)
    assert "--examples 2 --seed 3 --out FILE`" in text and "torch" in text
    assert "| Linear | weight | 1.00 | 1.00 | 1.0000 |" in text and "| digits | 9 |" in text
