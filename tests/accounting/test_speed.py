"""Processor time on one core, with a margin for slow machines: the targets are 0.3 s and 2 s."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from clipwise.accounting import accountants, calibrate, pld
from clipwise.privacy import Entry

Make = Callable[..., Entry]
DELTA = 1e-5
MARGIN = 3
SETTINGS = [
    (0.01, 1.0, 1000),
    (0.004, 1.1, 15000),
    (0.1, 4.0, 500),
    (1e-4, 0.7, 200_000),
    (1.0, 20.0, 100),
    (0.01, 0.5, 1000),
]


def seconds(ask: Callable[[], object]) -> float:
    """The best of three measurements with cold caches."""
    found = []
    for _ in range(3):
        for cached in (pld._directions, pld._of_step, pld._loss_moments):
            cached.cache_clear()
        start = time.process_time()
        ask()
        found.append(time.process_time() - start)
    return min(found)


@pytest.mark.parametrize("sampling", ["poisson", "fixed-size"])
@pytest.mark.parametrize(("rate", "z", "steps"), SETTINGS)
def test_one_epsilon(entry: Make, sampling: str, rate: float, z: float, steps: int) -> None:
    history = [entry(sampling, rate, z, steps)]
    assert seconds(lambda: accountants.epsilon_of(history, DELTA)) < 0.3 * MARGIN


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["poisson", "fixed-size"])
def test_one_calibration(entry: Make, sampling: str) -> None:
    rate, z, steps = 1e-4, 0.7, 200_000  # the slowest of the settings
    event = entry(sampling, rate, z, 1).event
    epsilon = accountants.epsilon_of([Entry(event, steps)], DELTA)
    for ask in (
        lambda: calibrate.smallest_noise(event, steps, epsilon, DELTA),
        lambda: calibrate.most_steps(event, epsilon, DELTA),
        lambda: calibrate.largest_rate(event, epsilon, DELTA, epochs=steps * rate),
    ):
        start = time.process_time()
        ask()
        assert time.process_time() - start < 2 * MARGIN
