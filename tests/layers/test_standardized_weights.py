"""Standardized weights: mean 0, one variance, exact per-example gradients, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

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


class Counted(TorchDispatchMode):
    """Counts the operations that run."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ["layer", "operations", "adapter"])
def test_weights_made_of_parameters_take_no_operation_per_example(how: str) -> None:
    """One batched product carries the gradients of all examples back."""

    def calls(batch: int) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 2))
        if how == "layer":
            standardize_weights(model)
        else:
            parametrize.register_parametrization(model[0], "weight", OPERATIONS[how]())
        clipper = PerExample(0.3).attach(site(model))
        x = torch.randn(batch, 2, 6, 6)
        for _ in range(3):  # the first steps probe
            clipper.clipped_sum(losses(model, (x,)))
        loss = losses(model, (x,))
        with Counted() as counted:
            clipper.clipped_sum(loss)
        return counted.calls

    assert calls(24) == calls(6)


class Operations(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return (w - w.mean((1, 2, 3), keepdim=True)) / w.std((1, 2, 3), keepdim=True)


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 18))

    def forward(self, w: Tensor) -> Tensor:
        return w + (self.up @ self.down).view_as(w)


OPERATIONS: dict[str, type[nn.Module]] = {"operations": Operations, "adapter": Adapter}


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
