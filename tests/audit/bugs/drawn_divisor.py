"""The noised sum is divided by the realised batch size, which is secret and changes with a record."""

import pytest
from torch import Tensor

from clipwise.clipping.per_example import PerExampleClipper
from clipwise.engine import step
from clipwise.engine.context import StepContext
from tests.audit.bug import Bug


def plant(patch: pytest.MonkeyPatch) -> None:
    clipped_sum, noised = PerExampleClipper.clipped_sum, step.noised
    drawn = [1]

    def counting(self: PerExampleClipper, losses: Tensor, real_B: Tensor | None = None) -> dict[str, Tensor]:
        drawn[0] = max(len(losses), 1)
        return clipped_sum(self, losses, real_B)

    def over_drawn(context: StepContext, total: dict[str, Tensor]) -> dict[str, Tensor]:
        divisor = context.clipper.divisor
        return {name: t * (divisor / drawn[0]) for name, t in noised(context, total).items()}

    patch.setattr(PerExampleClipper, "clipped_sum", counting)
    patch.setattr(step, "noised", over_drawn)


BUG = Bug("division by the realised batch size", plant, ("neighbours",))
