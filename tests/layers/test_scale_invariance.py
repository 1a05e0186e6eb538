"""The scale invariance of normalized networks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from clipwise.layers.public_statistics import PublicStatistics
from tests.layers.normalized import images, network, sound


def scaled(model: nn.Module, factors: list[float]) -> None:
    """Weights and biases before each normalization times a positive number."""
    with torch.no_grad():
        for place, factor in zip((0, 3, 7), factors, strict=True):
            model[place].weight.mul_(factor)
            model[place].bias.mul_(factor)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(factors=st.lists(st.floats(1e-2, 1e4), min_size=3, max_size=3))
@pytest.mark.parametrize("kind", ["batch", "public", "public-exact", "self+public", "group", "layer"])
def test_the_scale_of_weights_before_a_normalization_does_not_matter(kind: str, factors: list[float]) -> None:
    model = network() if kind == "batch" else sound(kind)[0]
    for layer in model.modules():
        if hasattr(layer, "eps"):
            layer.eps = 1e-14  # with eps = 0 the invariance is exact
    x = images(6)
    if hasattr(model[1], "statistics"):
        PublicStatistics.of(model).refresh(force=True)
    before = model(x)
    scaled(model, factors)
    if hasattr(model[1], "statistics"):
        PublicStatistics.of(model).refresh()
    torch.testing.assert_close(model(x), before, rtol=1e-6, atol=1e-6)


def test_without_normalization_the_scale_matters() -> None:
    model, x = network(), images(6)
    for place in (1, 4, 8):
        model[place] = nn.Identity()
    before = model(x)
    scaled(model, [3.0, 3.0, 3.0])
    assert not torch.allclose(model(x), before, rtol=0.1)
