"""Bounds compared with true gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.errors import ConfigurationError
from clipwise.layers import ClipInput
from clipwise.lipschitz import Huber, SoftmaxCrossEntropy, trace
from experiments.lip_dp_sgd.bound_tightness import tightness


def test_a_single_layer_reaches_its_bound() -> None:
    model = nn.Sequential(ClipInput(2.0), nn.Linear(3, 1, bias=False))
    nn.init.zeros_(model[1].weight)  # type: ignore[arg-type]
    x = torch.eye(3) * torch.tensor([[0.5], [9.0], [1.0]])  # the second one is clipped to length 2
    found = tightness(model, Huber(0.7), x, torch.full((3, 1), 100.0))["1.weight"]
    assert found.example == 1
    assert found.largest == pytest.approx(0.7 * 2.0, rel=1e-5)
    assert 1 <= found.ratio <= 1 + 1e-4 and found.bound >= found.largest


def test_norms_are_those_of_single_examples_and_frozen_parameters_have_none() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(ClipInput(1.0), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model[1].bias.requires_grad_(False)  # type: ignore[union-attr]
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    loss = SoftmaxCrossEntropy()
    found = tightness(model, loss, x, y)
    assert list(found) == ["1.weight", "3.weight", "3.bias"]
    for name, p in model.named_parameters():
        if p.requires_grad:
            norms = [_norm(model, loss, p, x[i : i + 1], y[i : i + 1]) for i in range(6)]
            assert found[name].largest == pytest.approx(max(norms), rel=1e-5)
            assert norms[found[name].example] == max(norms)


def _norm(model: nn.Module, loss: SoftmaxCrossEntropy, p: Tensor, x: Tensor, y: Tensor) -> float:
    return float(torch.autograd.grad(loss(model(x), y).sum(), p)[0].norm())


def test_without_any_gradient_the_ratio_is_infinite_and_without_examples_there_is_none() -> None:
    model = nn.Sequential(ClipInput(1.0), nn.Linear(2, 1, bias=False))
    none = tightness(model, Huber(), torch.zeros(1, 2), torch.zeros(1, 1))["1.weight"]
    assert none.largest == 0 and none.ratio == math.inf
    with pytest.raises(ConfigurationError, match="at least one example"):
        tightness(model, Huber(), torch.zeros(0, 2), torch.zeros(0, 1))


def network() -> nn.Sequential:
    return nn.Sequential(ClipInput(1.0), nn.Linear(4, 3))


GIVEN: dict[str, Any] = {
    "model": network(),
    "loss": SoftmaxCrossEntropy(),
    "inputs": torch.ones(6, 4),
    "targets": torch.zeros(6).long(),
}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no model": ({"model": None}, r"model must be a torch\.nn\.Module"),
    "a frozen model": ({"model": network().requires_grad_(False)}, "model has no trainable parameter"),
    "a loss without a constant": ({"loss": F.cross_entropy}, "loss must be a .*BoundedLoss.* not function"),
    "a class": ({"loss": SoftmaxCrossEntropy}, "loss must be a .*BoundedLoss"),
    "an array": ({"inputs": np.ones((6, 4), np.float32)}, "inputs must be a tensor .* not ndarray"),
    "an array of targets": ({"targets": np.zeros(6, int)}, "targets must be a tensor .* not ndarray"),
    "a list": ({"targets": [0] * 6}, "targets must be a tensor .* not list"),
    "a number": ({"inputs": torch.tensor(1.0)}, "inputs must be a tensor .* not a single number"),
    "another type": ({"inputs": torch.ones(6, 4).double()}, "inputs: the model does not take such rows"),
    "a class that is not there": ({"targets": torch.full((6,), 9)}, "targets: the loss does not take such rows"),
}


@pytest.mark.parametrize("what", BAD)
def test_arguments_that_do_not_fit_are_named(what: str) -> None:
    changed, message = BAD[what]
    with pytest.raises(ConfigurationError, match=message):
        tightness(**{**GIVEN, **changed})


def test_a_trace_takes_a_model() -> None:
    with pytest.raises(ConfigurationError, match=r"model must be a torch\.nn\.Module, not NoneType"):
        trace(None, (4,))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [4, (4.0,), (0,), "4", None])
def test_a_trace_takes_the_shape_of_an_example(shape: Any) -> None:
    model = nn.Sequential(ClipInput(1.0), nn.Linear(4, 2))
    with pytest.raises(ConfigurationError, match="input_shape must be the sizes of one example"):
        trace(model, shape)
    assert trace(model, (np.int64(4),)).input_shape == (4,)


def test_a_loop_without_gradients_makes_no_difference() -> None:
    with torch.no_grad():
        found = tightness(**GIVEN)
    assert found == tightness(**GIVEN)
