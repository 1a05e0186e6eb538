from __future__ import annotations

from collections.abc import Callable

import pytest

from clipwise.privacy import SUPPORTED, Adjacency, Entry, Event, Sampling, Unit


@pytest.fixture(scope="session")
def entry() -> Callable[..., Entry]:
    """entry("poisson", rate, z, steps): an entry of a history."""

    def make(
        sampling: str,
        rate: float,
        z: float,
        steps: int,
        *,
        period: int = 1,
        adjacency: Adjacency | None = None,
        unit: Unit = Unit.RECORD,
    ) -> Entry:
        scheme = Sampling(sampling)
        return Entry(Event(scheme, adjacency or SUPPORTED[scheme][0], unit, z, rate, period), steps)

    return make
