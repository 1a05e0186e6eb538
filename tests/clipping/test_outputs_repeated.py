"""Losses that depend on the targets of other examples through broadcasting are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from clipwise.clipping.outputs import RepeatedOutputs
from clipwise.errors import CoupledExamplesError

Loss = Callable[[Tensor, Tensor], Tensor]


def outputs(size: int, *shape: int) -> Tensor:
    return torch.randn(size, *shape, requires_grad=True) * 1.0


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    ("loss", "shape"),
    [
        (lambda o, y: F.smooth_l1_loss(o, y, reduction="none").sum(1), (1,)),
        (lambda o, y: (o - y).abs().mean(1), (1,)),
        (lambda o, y: (o - y.unsqueeze(1)).abs().sum(1), ()),
        (lambda o, y: (o @ y.unsqueeze(0)).abs().sum(1), (1,)),
    ],
)
def test_outputs_broadcast_against_all_targets_are_refused(loss: Loss, shape: tuple[int, ...]) -> None:
    for size in (2, 3, 7):
        o, y = outputs(size, *shape), torch.randn(size)
        with pytest.raises(CoupledExamplesError, match="targets of all"):
            RepeatedOutputs().require_none(loss(o, y), o)


@pytest.mark.parametrize(
    ("loss", "shape"),
    [
        (lambda o, y: F.smooth_l1_loss(o, y.unsqueeze(1), reduction="none").sum(1), (1,)),
        (lambda o, y: (o - y).square(), ()),
        (lambda o, y: F.cross_entropy(o, y.long(), reduction="none"), (7,)),
        (lambda o, y: (o.unsqueeze(1) - torch.zeros(3, 1)).abs().sum((1, 2)), (7,)),
        (lambda o, y: (o - o.gather(1, y.long().unsqueeze(1))).relu().sum(1), (7,)),
    ],
)
def test_ordinary_losses_are_taken_for_every_batch_size(loss: Loss, shape: tuple[int, ...]) -> None:
    look = RepeatedOutputs()
    for size in (1, 2, 4, 7):
        o = outputs(size, *shape)
        look.require_none(loss(o, torch.zeros(size)), o)


def test_a_constant_that_happens_to_be_the_batch_size_is_known_from_other_batches() -> None:
    thresholds = torch.linspace(0, 1, 5)
    look = RepeatedOutputs()
    for size in (4, 5):
        o = outputs(size, 1)
        look.require_none((o - thresholds).abs().sum(1), o)
    with pytest.raises(CoupledExamplesError, match="use another batch size"):
        o = outputs(5, 1)
        RepeatedOutputs().require_none((o - thresholds).abs().sum(1), o)
