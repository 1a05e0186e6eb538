import math

import pytest

from clipwise import accounting
from clipwise.errors import UnsupportedEventError
from clipwise.privacy import Adjacency, Entry, Event, Sampling, Unit


def event(sampling: Sampling, z: float, rate: float, period: int = 1) -> Event:
    adjacency = Adjacency.REPLACE_ONE if sampling is Sampling.FIXED_SIZE else Adjacency.ZERO_OUT
    return Event(sampling, adjacency, Unit.RECORD, z, rate, period)


HISTORIES = [
    [Entry(event(Sampling.POISSON, 1.1, 256 / 60000), 14062)],
    [Entry(event(Sampling.POISSON, 0.7, 1024 / 60000), 59)],
    [Entry(event(Sampling.FULL, 20.0, 1.0), 100)],
    [Entry(event(Sampling.SHUFFLED, 4.0, 0.1, 10), 25)],
    [Entry(event(Sampling.POISSON, 1.0, 0.01), 300), Entry(event(Sampling.FULL, 10.0, 1.0), 4)],
]


@pytest.mark.parametrize("history", HISTORIES)
def test_two_implementations_agree(history: list[Entry]) -> None:
    ours = accounting.epsilon_of(history, 1e-5)
    theirs = accounting.epsilon_of(history, 1e-5, "dp-accounting")
    assert ours == pytest.approx(theirs, rel=2e-3)
    assert accounting.delta_of(history, ours, "dp-accounting") == pytest.approx(1e-5, rel=2e-2)


def test_edges() -> None:
    assert accounting.epsilon_of([], 1e-5, "dp-accounting") == 0
    none = [Entry(event(Sampling.FULL, 0.0, 1.0), 1)]
    assert accounting.epsilon_of(none, 1e-5, "dp-accounting") == math.inf
    assert accounting.delta_of(none, 1.0, "dp-accounting") == 1
    with pytest.raises(UnsupportedEventError, match="pld"):
        accounting.epsilon_of([Entry(event(Sampling.FIXED_SIZE, 1.0, 0.1), 3)], 1e-5, "dp-accounting")
