"""One layer is released without noise."""

import pytest
from torch import Tensor

from clipwise.engine import step
from clipwise.engine.context import StepContext
from tests.audit.bug import Bug

LAYER = "2.weight"


def plant(patch: pytest.MonkeyPatch) -> None:
    noised = step.noised

    def forgetful(context: StepContext, total: dict[str, Tensor]) -> dict[str, Tensor]:
        clean = total[LAYER] / context.clipper.divisor
        return {**noised(context, total), LAYER: clean}

    patch.setattr(step, "noised", forgetful)


BUG = Bug("noise forgotten in one layer", plant, ("neighbours", "canary"), canary={"parameter": LAYER})
