"""Layers with bounds of their own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from clipwise.errors import ConfigurationError, UnsupportedModelError
from clipwise.layers.bounded import BoundedGroupNorm, BoundedLayerNorm, ClipInput
from clipwise.lipschitz import SoftmaxCrossEntropy, trace
from clipwise.lipschitz.activations import FUNCTIONS, MODULES, constants_of


@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([1e-30, 0.01, 1.0, 1e4, 1e30]),
    norm=st.sampled_from([0.1, 1.0, 7.0]),
)
def test_inputs_are_clipped_and_short_ones_stay(seed: int, scale: float, norm: float) -> None:
    x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(seed)) * scale
    for mode in (True, False):
        y = ClipInput(norm).train(mode)(x)
        lengths = y.double().flatten(1).norm(dim=1)
        assert bool((lengths <= norm).all())
        short = x.double().flatten(1).norm(dim=1) <= norm
        assert torch.equal(y[short], x[short])
        assert torch.allclose(lengths[~short], torch.tensor(norm, dtype=torch.float64), rtol=1e-5)


def test_a_scale_that_float32_would_round_up_is_zero() -> None:
    for power in torch.arange(37, 38.5, 0.01).tolist():
        x = torch.tensor([[10.0**power]])
        assert float(ClipInput(1e-7)(x).detach()) <= 1e-7
        assert float(ClipInput(1e-7)(x.double()).detach()) == pytest.approx(1e-7, rel=1e-12)


def test_non_finite_inputs_count_as_zero_and_others_stay() -> None:
    x = torch.tensor([[math.nan, 1.0], [math.inf, 0.0], [0.1, 0.2]], requires_grad=True)
    y = ClipInput(1.0)(x)
    assert y.tolist() == [[0.0, 0.0], [0.0, 0.0], [pytest.approx(0.1), pytest.approx(0.2)]]
    (g,) = torch.autograd.grad(y.sum(), x)
    assert bool(torch.isfinite(g).all())


def test_the_gradient_of_the_clip_is_right() -> None:
    x = torch.randn(3, 4, dtype=torch.float64) * torch.tensor([[0.01], [1.0], [5.0]], dtype=torch.float64)
    assert torch.autograd.gradcheck(ClipInput(1.0), (x.requires_grad_(),), atol=1e-6)


def test_groups_are_normalized_unless_their_deviation_is_below_alpha() -> None:
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    expected = F.group_norm(x, 2, eps=0.0)
    assert torch.allclose(BoundedGroupNorm(2, 4, alpha=1e-9)(x), expected)
    flat = 0.001 * x
    centred = flat - flat.reshape(2, 2, -1).mean(2).repeat_interleave(2, 1).unsqueeze(-1)
    assert torch.allclose(BoundedGroupNorm(2, 4, alpha=0.5)(flat), centred / 0.5)
    layer = BoundedLayerNorm((4, 5), alpha=1e-9)(x)
    assert torch.allclose(layer, F.layer_norm(x, (4, 5), eps=0.0))
    same = torch.ones(1, 4, 5, requires_grad=True)
    (g,) = torch.autograd.grad(BoundedLayerNorm((4, 5))(same)[0, 0, 0], same)
    assert bool(torch.isfinite(g).all())


@given(seed=st.integers(0, 10**6), scale=st.sampled_from([0.01, 1.0, 100.0]))
def test_the_slope_of_a_bounded_norm_is_at_most_one_over_alpha(seed: int, scale: float) -> None:
    x = torch.randn(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    layer = BoundedLayerNorm(6, alpha=0.3)
    jacobian = torch.autograd.functional.jacobian(lambda v: layer(v.unsqueeze(0))[0], x)
    assert float(torch.linalg.matrix_norm(jacobian, 2)) <= (1 + 1e-12) / 0.3


@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_slopes_of_activations_are_true_and_reached(kind: type[nn.Module]) -> None:
    module = kind()
    slope, at_zero, most = MODULES[kind](module)
    x = torch.linspace(-15, 15, 600_001, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(0)
    y = module(x)
    (g,) = torch.autograd.grad(y.sum(), x)
    y = y.detach()
    assert float(g.abs().amax()) <= slope * (1 + 1e-12)
    assert float(g.abs().amax()) >= 0.999 * slope
    assert float(module(torch.zeros(1))) == pytest.approx(at_zero * math.copysign(1, float(module(torch.zeros(1)))))
    assert float(y.abs().amax()) <= most


@pytest.mark.parametrize("function", [f for f in FUNCTIONS if callable(f)], ids=lambda f: f.__name__)
def test_slopes_of_functions_are_true(function: object) -> None:
    slope, at_zero, most = constants_of(FUNCTIONS[function][0]())
    x = torch.linspace(-15, 15, 300_001, dtype=torch.float64, requires_grad=True)
    y = function(x)  # type: ignore[operator]
    (g,) = torch.autograd.grad(y.sum(), x)
    y = y.detach()
    assert float(g.abs().amax()) <= slope * (1 + 1e-12)
    assert float(y.abs().amax()) <= most
    assert abs(float(function(torch.zeros(1)))) == pytest.approx(at_zero)  # type: ignore[operator]


@pytest.mark.parametrize(
    "make",
    [
        lambda: ClipInput(0.0),
        lambda: ClipInput(math.inf),
        lambda: BoundedGroupNorm(3, 4),
        lambda: BoundedLayerNorm(4, alpha=0.0),
        lambda: BoundedLayerNorm(4, alpha=-1.0),  # its bounds would be negative
        lambda: BoundedGroupNorm(2, 4, alpha=-1.0),
        lambda: ClipInput(1.0)(torch.ones(2, 3, dtype=torch.long)),
        lambda: BoundedLayerNorm(4)(torch.ones(2, 3)),
    ],
)
def test_invalid_settings_are_refused(make: object) -> None:
    with pytest.raises(ConfigurationError):
        make()  # type: ignore[operator]


def test_numpy_numbers_are_accepted() -> None:
    assert ClipInput(np.float32(2.0)).max_norm == 2.0  # type: ignore[arg-type]
    assert BoundedLayerNorm(4, alpha=np.float32(0.5)).alpha == 0.5  # type: ignore[arg-type]
    assert repr(SoftmaxCrossEntropy(np.float32(2.0))) == "SoftmaxCrossEntropy(temperature=2.0)"  # type: ignore[arg-type]


@pytest.mark.parametrize("alpha", [-1.0, 0.0, math.nan])
def test_an_invalid_alpha_is_refused(alpha: float) -> None:
    for norm in (BoundedLayerNorm(4), BoundedGroupNorm(2, 4)):
        norm.alpha = alpha
        with pytest.raises(UnsupportedModelError, match=r"'1'.*alpha="):
            trace(nn.Sequential(ClipInput(1.0), norm, nn.Linear(4, 2)), (4,))
