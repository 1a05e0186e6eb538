from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipwise.accounting import calibrate, gaussian, pld
from clipwise.privacy import Entry

Make = Callable[..., Entry]
DELTA = 1e-5


@pytest.mark.parametrize(
    ("sampling", "rate", "steps", "period", "epsilon"),
    [
        ("poisson", 256 / 60000, 14062, 1, 3.0),
        ("poisson", 0.01, 1, 1, 1.0),
        ("poisson", 0.1, 1000, 1, 1000.0),
        ("poisson", 0.01, 1000, 1, 1e-3),
        ("poisson", 0.1, 100, 1, 1e7),
        ("fixed-size", 256 / 60000, 14062, 1, 3.0),
        ("partition", 0.05, 100, 1, 0.2),
        ("shuffled", 0.1, 95, 10, 2.0),
        ("full", 1.0, 1000, 1, 2.0),
    ],
)
def test_noise_is_enough_and_not_too_much(
    entry: Make, sampling: str, rate: float, steps: int, period: int, epsilon: float
) -> None:
    event = entry(sampling, rate, 1.0, 1, period=period).event
    z = calibrate.smallest_noise(event, steps, epsilon, DELTA)
    assert pld.epsilon([Entry(replace(event, noise_multiplier=z), steps)], DELTA) <= epsilon
    assert pld.epsilon([Entry(replace(event, noise_multiplier=0.995 * z), steps)], DELTA) > epsilon
    assert z == float(f"{z:.4e}")  # rounded to a few digits, as it will be written down


def test_without_amplification_the_closed_form_is_met(entry: Make) -> None:
    z = calibrate.smallest_noise(entry("shuffled", 0.1, 1.0, 1, period=10).event, 35, 1.0, DELTA)
    exact = math.sqrt(4) / gaussian.largest_mu(1.0, DELTA)
    assert exact <= z <= exact * (1 + 6e-4)


def test_no_steps_need_no_noise(entry: Make) -> None:
    assert calibrate.smallest_noise(entry("poisson", 0.1, 1.0, 1).event, 0, 1.0, DELTA) == 0


def test_few_distributions_are_built(entry: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = pld.epsilon
    monkeypatch.setattr(pld, "epsilon", lambda *args: calls.append(1) or real(*args))  # type: ignore[func-returns-value]
    for target in (0.5, 8.0):
        calls.clear()
        calibrate.smallest_noise(entry("poisson", 0.01, 1.0, 1).event, 2000, target, DELTA)
        assert len(calls) <= 10


@settings(max_examples=6, deadline=None)
@given(st.floats(0.3, 4), st.integers(0, 400), st.floats(0.7, 2))
def test_steps_within_is_the_last_that_fits(entry: Make, epsilon: float, before: int, z: float) -> None:
    history = [entry("poisson", 0.02, 1.5, before)]
    event = entry("poisson", 0.02, z, 1).event

    def cost(steps: int) -> float:
        return pld.epsilon([*history, Entry(event, steps)], DELTA)

    steps = calibrate.steps_within(history, event, epsilon, DELTA, 5000)
    if cost(0) > epsilon:
        assert steps == 0
    else:
        assert cost(steps) <= epsilon
        assert steps == 5000 or cost(steps + 1) > epsilon


def test_steps_within_at_its_ends(entry: Make) -> None:
    step = entry("poisson", 0.01, 1.0, 1).event
    assert calibrate.steps_within([], step, 10.0, DELTA, 100) == 100
    assert calibrate.steps_within([], step, 10.0, DELTA, 0) == 0
    assert calibrate.steps_within([Entry(step, 1000)], step, 1.0, DELTA, 100) == 0
    assert calibrate.steps_within([], entry("poisson", 0.01, 0.0, 1).event, 10.0, DELTA, 100) == 0


def test_steps_within_stops_at_the_end_of_a_shuffled_epoch(entry: Make) -> None:
    event = entry("shuffled", 0.1, 2.0, 1, period=10).event
    budget = gaussian.epsilon(DELTA, math.sqrt(3) / 2) * 1.001
    assert calibrate.steps_within([], event, budget, DELTA, 1000) == 30
    assert calibrate.steps_within([Entry(event, 15)], event, budget, DELTA, 1000) == 10
