"""Losses divided by the number drawn are refused, by every strategy that bounds single examples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipwise import Backprop, Lipschitz, PerExample, layers
from clipwise.clipping import Strategy
from clipwise.drawn_size import DrawnSize
from clipwise.errors import CoupledExamplesError
from tests.runs import network, private_run

DIVIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "divided": lambda losses: losses / len(losses),
    "by a size": lambda losses: torch.div(losses, losses.shape[0]),
    "multiplied": lambda losses: (1 / len(losses)) * losses,
    "the other way": lambda losses: losses * len(losses),
    "further in": lambda losses: 3.0 * (losses / len(losses)) + 1.0,
}
CONSTANT: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda losses: losses,
    "one size": lambda losses: losses / 4,
    "another": lambda losses: losses / 7,
    "positions": lambda losses: losses / 4 * 0.25,
}


def losses_of(size: int) -> Tensor:
    torch.manual_seed(size)
    return F.cross_entropy(nn.Linear(5, 3)(torch.randn(size, 5)), torch.zeros(size).long(), reduction="none")


@pytest.mark.parametrize("how", DIVIDED)
def test_two_sizes_show_a_factor_that_follows_them(how: str) -> None:
    lint = DrawnSize()
    for size in (1, 4, 4):
        lint.examine(DIVIDED[how](losses_of(size)))
    with pytest.raises(CoupledExamplesError, match="leave the division out"):
        lint.examine(DIVIDED[how](losses_of(6)))
    lint.examine(DIVIDED[how](losses_of(4)))
    with pytest.raises(CoupledExamplesError):  # also on the next try
        lint.examine(DIVIDED[how](losses_of(7)))


@pytest.mark.parametrize("how", CONSTANT)
def test_constants_stay(how: str) -> None:
    lint = DrawnSize()
    for size in (4, 7, 4, 9, 2):
        lint.examine(CONSTANT[how](losses_of(size)))


STRATEGIES: dict[str, Callable[[], tuple[nn.Module, Strategy]]] = {
    "per example": lambda: (network(), PerExample(1.0)),
    "backprop": lambda: (layers.clip_inputs(network(), input_norm=1.0), Backprop()),
    "lipschitz": lambda: (nn.Sequential(layers.ClipInput(1.0), network()), Lipschitz(1.0, 1.0)),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_refuses_a_mean_in_disguise(strategy: str) -> None:
    model, clipping = STRATEGIES[strategy]()
    _, private = private_run(model, clipping=clipping)
    with pytest.raises(CoupledExamplesError, match="leave the division out"):
        for _ in range(20):
            for x, y in private.loader:
                outputs = model(x)
                losses = F.cross_entropy(outputs, y, reduction="none") / len(x)
                private.step(losses, outputs=outputs)
