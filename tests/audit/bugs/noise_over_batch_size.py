"""The sum gets the noise of a mean: its standard deviation is divided by the batch size."""

from typing import Any

import pytest

from clipwise.noise import mechanism
from clipwise.noise.gaussian import gaussian
from tests.audit.bug import Bug


def plant(patch: pytest.MonkeyPatch) -> None:
    def smaller(key: bytes, size: int, std: float, **options: Any) -> Any:
        return gaussian(key, size, std / 16, **options)

    patch.setattr(mechanism, "gaussian", smaller)


BUG = Bug("noise divided by the batch size", plant, ("neighbours", "canary"))
