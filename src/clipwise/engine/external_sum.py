"""A step whose clipped sum and noise are made elsewhere, by the clients of a federated run.

The engine draws the units, charges the ledger before any client draws noise, and updates the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from clipwise.engine import step
from clipwise.engine.context import StepContext


def draw(context: StepContext) -> list[int]:
    """The records of the next step. The step is charged: it counts even if `release` is never called."""
    drawn: list[int] = []
    for _ in context.loader.pieces():
        piece = context.loader.awaited()
        step.begin(context, piece)
        piece.consumed = True
        drawn += [int(i) for i in piece.indices]
        if piece.last:
            break
    with step.releasing(context):
        step.charge(context)
    return drawn


def release(context: StepContext, released: Callable[[], dict[str, Tensor]]) -> None:
    """Update the weights with (sum + noise) / divisor of the step that was drawn last."""
    with step.releasing(context):
        step.release(context, released, partial(step.write_gradient, context), check=None)
    step.update(context)
