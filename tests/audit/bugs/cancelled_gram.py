"""Norms from inner products in float32, without a bound on their error: where positions cancel, a norm of 0."""

import pytest
import torch
from torch import Tensor, nn

from clipwise.audit.trial import run_of
from clipwise.gradients.forms import Budget, Outer
from tests.audit.bug import Bug, Subject

T, WIDTH = 16, 96


def plant(patch: pytest.MonkeyPatch) -> None:
    def plain(self: Outer, budget: Budget) -> tuple[Tensor, Tensor]:
        left, right = self.left.float(), self.right.float()
        square_B = ((left @ left.mT) * (right @ right.mT)).sum((1, 2)).clamp_min(0).double()
        return square_B, torch.zeros_like(square_B)

    patch.setattr(Outer, "gram_squares", plain)


def positions(steps: int) -> Subject:
    """A product at each of 16 positions, and a linear loss of their sum."""
    torch.manual_seed(0)
    x = torch.randn(8, T, WIDTH)
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    return run_of(model, lambda m, x: m(x).sum((1, 2)), (x,), sampling="full", sample_rate=None, steps=steps)


def cancelling(record: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Huge values of alternating sign, plus small ones."""
    (x,) = record
    signs = 1 - 2 * (torch.arange(T) % 2)
    return (3e4 * x[:1] * signs[:, None] + x,)


BUG = Bug(
    "a Gram norm that cancels to zero",
    plant,
    ("neighbours",),
    subject=lambda: positions(2),
    attacked=lambda: positions(1),
    neighbours={"changes": {"cancelling": cancelling}, "records": range(8)},
)
