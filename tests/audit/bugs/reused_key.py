"""The key does not advance: every step has the same noise."""

import pytest

from clipwise.noise.key import NoiseKey
from tests.audit.bug import Bug


def plant(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NoiseKey, "advance", lambda self: None)


def keys_differ() -> None:
    key = NoiseKey.from_seed(0, b"")
    before = key.derive("noise/0")
    key.advance()
    assert key.derive("noise/0") != before


BUG = Bug("a reused noise key", plant, ("neighbours", "deterministic test"), deterministic=keys_differ)
