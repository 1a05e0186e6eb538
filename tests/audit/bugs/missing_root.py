"""Each of K parts is noised as if it were the only one, and one release is charged: sqrt(K) is missing."""

import math
from collections.abc import Sequence
from functools import partial

import pytest

from clipwise import PerExample
from clipwise.clipping import base
from clipwise.engine import make_private
from tests.audit.bug import Bug, one_release, small


def plant(patch: pytest.MonkeyPatch) -> None:
    def each_alone(sensitivities: Sequence[float], dimensions: Sequence[int], z: float, split: str) -> list[float]:
        return [z * s for s in sensitivities]

    patch.setattr(base, "split_noise", each_alone)
    patch.setattr(make_private, "effective_multiplier", lambda parts: math.inf)


by_tensor = PerExample(max_norm=1.0, parts="tensor")  # four parts
BUG = Bug(
    "missing sqrt(K)",
    plant,
    ("neighbours", "canary"),
    subject=partial(small, clipping=by_tensor),
    attacked=partial(one_release, clipping=by_tensor),
)
