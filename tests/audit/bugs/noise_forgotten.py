"""One layer is released without noise."""

import pytest
from torch import Tensor

from clipwise.engine.private import Private
from tests.audit.bug import Bug

LAYER = "2.weight"


def plant(patch: pytest.MonkeyPatch) -> None:
    noised = Private._noised

    def forgetful(self: Private, total: dict[str, Tensor]) -> dict[str, Tensor]:
        clean = total[LAYER] / self.divisor
        return {**noised(self, total), LAYER: clean}

    patch.setattr(Private, "_noised", forgetful)


BUG = Bug("noise forgotten in one layer", plant, ("neighbours", "canary"), canary={"parameter": LAYER})
