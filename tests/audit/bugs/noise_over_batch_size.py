"""The sum gets the noise of a mean: its standard deviation is divided by the batch size."""

from collections.abc import Sequence

import pytest
from torch import Tensor

from clipwise.noise import mechanism
from clipwise.noise.gaussian import add_gaussian
from tests.audit.bug import Bug


def plant(patch: pytest.MonkeyPatch) -> None:
    def smaller(key: bytes, sums: Sequence[Tensor], stds: Sequence[float], divisor: float) -> None:
        add_gaussian(key, sums, [std / 16 for std in stds], divisor)

    patch.setattr(mechanism, "add_gaussian", smaller)


BUG = Bug("noise divided by the batch size", plant, ("neighbours", "canary"))
