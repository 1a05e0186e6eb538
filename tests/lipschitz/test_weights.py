"""Weights are within their limits after clipping, and otherwise unchanged."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from clipwise.errors import ConfigurationError
from clipwise.layers.bounded import ClipInput
from clipwise.lipschitz import clip_weights_, limits_of, on_limit, trace
from tests.lipschitz.networks import draw


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(ClipInput(1.0), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


@pytest.mark.parametrize("norm", ["spectral", "frobenius"])
@pytest.mark.parametrize("limit", [0.01, 0.5])
def test_norms_are_within_their_limits_afterwards(norm: str, limit: float) -> None:
    model = net()
    network = trace(model, (1, 6, 6))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(30)
    clip_weights_(network, limits_of(network, limit), norm)
    kind = 2 if norm == "spectral" else "fro"
    for p in model.parameters():
        matrix = p.detach().double().flatten(1) if p.ndim > 1 else p.detach().double().unsqueeze(0)
        found = float(torch.linalg.matrix_norm(matrix, kind))
        assert found <= limit
        assert found >= 0.99 * limit  # no more than needed: Gram bounds are this close


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_clipping_again_changes_nothing() -> None:
    for family in ("dense", "convolutional", "table"):
        for seed in range(10):
            model, shape = draw(family, seed)
            network = trace(model, shape)
            limits = limits_of(network, 0.8)
            clip_weights_(network, limits)
            before = [p.clone() for p in model.parameters()]
            ratios = clip_weights_(network, limits)
            assert all(float(r) <= 1 for r in ratios.values())
            for p, old in zip(model.parameters(), before, strict=True):
                assert torch.allclose(p, old, rtol=1e-5, atol=0)


def test_small_weights_stay_and_on_limit_names_the_others() -> None:
    model = net()
    network = trace(model, (1, 6, 6))
    before = [p.clone() for p in model.parameters()]
    ratios = clip_weights_(network, limits_of(network, 100.0))
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert not any(on_limit(ratios).values())
    found = on_limit(clip_weights_(network, limits_of(network, {"1": 0.01, "4": 100.0})))
    assert found == {"1.weight": True, "1.bias": True, "4.weight": False, "4.bias": False}


def test_rows_of_a_table_are_clipped_separately() -> None:
    model = nn.Sequential(nn.Embedding(3, 2))
    model[0].weight.data = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    network = trace(model, (2,))
    clip_weights_(network, limits_of(network, 1.0))
    assert torch.allclose(model[0].weight, torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))


class AddedAndApplied(nn.Module):
    """One weight with two uses: limited by its L2 norm as a summand, and by its spectral norm as a map."""

    def __init__(self) -> None:
        super().__init__()
        self.clip, self.linear = ClipInput(1.0), nn.Linear(3, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(self.clip(x) + self.linear.weight)
        return y


def test_a_weight_with_two_uses_obeys_the_stricter_limit() -> None:
    model = AddedAndApplied()
    nn.init.eye_(model.linear.weight)
    network = trace(model, (3, 3))
    clip_weights_(network, limits_of(network, 0.5))
    assert 0.49 < float(model.linear.weight.detach().double().norm()) <= 0.5


def test_limits_by_name_and_wrong_ones() -> None:
    network = trace(net(), (1, 6, 6))
    assert limits_of(network, {"1": 2.0, "4": 3.0, "4.bias": 1.0}) == {
        "1.weight": 2.0,
        "1.bias": 2.0,
        "4.weight": 3.0,
        "4.bias": 1.0,
    }
    with pytest.raises(ConfigurationError, match=r"'4\.weight'"):
        limits_of(network, {"1": 2.0})
    with pytest.raises(ConfigurationError, match="'7' is no parameter"):
        limits_of(network, {"1": 2.0, "4": 1.0, "7": 1.0})
    for key in (1, None, ("1",)):  # not names, though 1 is a layer's index
        with pytest.raises(ConfigurationError, match=r"max_weight_norm: .* is no parameter.*'1\.weight'"):
            limits_of(network, {key: 2.0, "4": 1.0})  # type: ignore[dict-item]
    for bad in (0.0, -1.0, math.inf, math.nan, True):
        with pytest.raises(ConfigurationError, match="greater than 0"):
            limits_of(network, bad)
    with pytest.raises(ConfigurationError, match="norm="):
        clip_weights_(network, limits_of(network, 1.0), "power")
