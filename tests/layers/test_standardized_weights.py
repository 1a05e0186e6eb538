"""Standardized weights: mean 0, one variance, exact per-example gradients, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

from clipwise.clipping import PerExample
from clipwise.errors import ConfigurationError
from clipwise.layers.standardized_weights import standardize_weights
from tests.gradients.cases import losses, oracle
from tests.sites import site


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 3, 2), nn.Flatten(), nn.Linear(27, 2)
    ).double()


@given(shift=st.floats(-100, 100), scale=st.floats(0.1, 100))
def test_shift_and_scale_of_the_underlying_weights_do_not_matter(shift: float, scale: float) -> None:
    model = standardize_weights(network(), eps=0)
    before = [model[i].weight.detach() for i in (0, 3)]
    with torch.no_grad():
        for i in (0, 3):
            model[i].parametrizations.weight.original.mul_(scale).add_(shift)
    for i, old in zip((0, 3), before, strict=True):
        w = model[i].weight.flatten(1)
        torch.testing.assert_close(w, old.flatten(1), rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(w.sum(1), torch.zeros_like(w[:, 0]), rtol=0, atol=1e-8)
        torch.testing.assert_close(w.square().sum(1), torch.ones_like(w[:, 0]))


def test_per_example_gradients_of_the_underlying_weights_are_exact() -> None:
    model, x = standardize_weights(network()), torch.randn(5, 2, 6, 6).double()
    each = oracle(model, (x,))
    squares = sum(g.flatten(1).square().sum(1) for g in each.values())
    total = PerExample(0.3).attach(site(model)).clipped_sum(losses(model, (x,)))
    for name, g in each.items():
        expected = torch.einsum("b,b...->...", (0.3 / squares.sqrt()).clamp(max=1), g)
        torch.testing.assert_close(total[name], expected, rtol=1e-8, atol=1e-10)


def test_only_convolutions_change_and_a_plain_layer_can_be_restored() -> None:
    model = standardize_weights(network())
    x = torch.randn(3, 2, 6, 6).double()
    out = model(x)
    assert not parametrize.is_parametrized(model[5])
    for i in (0, 3):
        parametrize.remove_parametrizations(model[i], "weight")
    assert type(model[0]) is nn.Conv2d
    torch.testing.assert_close(model(x), out)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2), "no convolution"),
        (nn.Sequential(nn.ConvTranspose2d(2, 2, 3)), "'0'.*transposed"),
        (nn.Sequential(nn.Conv2d(3, 3, 1, groups=3)), "'0'.*one weight per output channel"),
        (standardize_weights(network()), "'0'.*standardized weights already"),
    ],
)
def test_what_cannot_be_standardized_is_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        standardize_weights(model)
