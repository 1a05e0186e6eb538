"""Norms are computed from the mean loss, so they are too small by the batch size, but the sum is not."""

import pytest
from torch import Tensor

from clipwise.clipping.per_example import PerExampleClipper
from tests.audit.bug import Bug


def plant(patch: pytest.MonkeyPatch) -> None:
    clipped_sum = PerExampleClipper.clipped_sum

    def of_mean(self: PerExampleClipper, losses: Tensor, real_B: Tensor | None = None) -> dict[str, Tensor]:
        B = max(len(losses), 1)
        return {name: B * total for name, total in clipped_sum(self, losses / B, real_B).items()}

    patch.setattr(PerExampleClipper, "clipped_sum", of_mean)


BUG = Bug("mean instead of sum", plant, ("neighbours", "canary"))
