from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipwise import accounting
from clipwise.accounting import accountants, calibrate, filter, from_arguments, gaussian, pld
from clipwise.errors import ConfigurationError
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
    assert accountants.epsilon_of([Entry(replace(event, noise_multiplier=z), steps)], DELTA) <= epsilon
    assert accountants.epsilon_of([Entry(replace(event, noise_multiplier=0.995 * z), steps)], DELTA) > epsilon
    assert z == float(f"{z:.4e}")  # rounded to a few digits


@pytest.mark.parametrize(
    ("sampling", "rate", "steps", "period", "used"),
    [
        ("poisson", 0.01, 500, 1, 0.5),
        ("poisson", 0.2, 10, 1, 0.99),
        ("fixed-size", 0.01, 500, 1, 0.1),
        ("shuffled", 0.1, 25, 10, 0.7),
        ("full", 1.0, 10, 1, 0.999),
    ],
)
def test_noise_after_other_releases_fits_under_the_filter(
    entry: Make, sampling: str, rate: float, steps: int, period: int, used: float
) -> None:
    """The other releases have used a share of the filter's budget for divergences."""
    event, order, epsilon = entry(sampling, rate, 1.0, 1, period=period).event, 8.0, 2.0
    has = epsilon - filter.conversion_at(order, DELTA)
    quiet = entry("full", 1.0, math.sqrt(order / (2 * used * has)), 1, adjacency=event.adjacency)
    z = calibrate.smallest_noise_after([quiet], event, steps, epsilon, DELTA, order)
    assert z is not None

    def cost(z: float) -> float:
        return filter.epsilon_at(order, [quiet, Entry(replace(event, noise_multiplier=z), steps)], DELTA)

    assert cost(z) <= epsilon < cost(0.99 * z)


def test_no_noise_is_enough_without_budget(entry: Make) -> None:
    loud = entry("full", 1.0, 0.5, 1)
    assert calibrate.smallest_noise_after([loud], loud.event, 1, 2.0, DELTA, 8.0) is None


def test_without_amplification_the_closed_form_is_reached(entry: Make) -> None:
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


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(st.floats(0.3, 4), st.integers(0, 400), st.floats(0.7, 2))
def test_steps_within_is_the_last_that_fits(entry: Make, epsilon: float, before: int, z: float) -> None:
    history = [entry("poisson", 0.02, 1.5, before)]
    event = entry("poisson", 0.02, z, 1).event

    def cost(steps: int) -> float:
        return accountants.epsilon_of([*history, Entry(event, steps)], DELTA)

    steps = calibrate.steps_within(history, event, epsilon, DELTA, 5000)
    if cost(0) > epsilon:
        assert steps == 0
    else:
        assert cost(steps) <= epsilon
        assert steps == 5000 or cost(steps + 1) > epsilon


def test_steps_within_at_the_limits(entry: Make) -> None:
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


@pytest.mark.parametrize(
    ("sampling", "rate", "z", "epsilon"),
    [
        ("poisson", 0.01, 1.0, 1.828),
        ("poisson", 0.01, 1.0, 0.25),
        ("fixed-size", 0.02, 1.5, 3.0),
        ("poisson", 1e-4, 2.0, 0.5),
        ("full", 1.0, 20.0, 2.0),
    ],
)
def test_most_steps_is_the_last_number_that_fits(
    entry: Make, sampling: str, rate: float, z: float, epsilon: float
) -> None:
    event = entry(sampling, rate, z, 1).event
    steps = calibrate.most_steps(event, epsilon, DELTA)
    assert accountants.epsilon_of([Entry(event, steps)], DELTA) <= epsilon
    assert accountants.epsilon_of([Entry(event, steps + 1 + steps // 1000)], DELTA) > epsilon


def test_steps_that_do_not_fit_are_refused_with_advice(entry: Make) -> None:
    with pytest.raises(ConfigurationError, match="even one step, which costs"):
        calibrate.most_steps(entry("poisson", 0.5, 0.5, 1).event, 0.1, DELTA)
    with pytest.raises(ConfigurationError, match="costs inf"):
        calibrate.most_steps(entry("poisson", 0.5, 0.0, 1).event, 10.0, DELTA)


def test_an_unlimited_number_of_steps(entry: Make) -> None:
    event = entry("poisson", 1e-9, 1e6, 1).event
    assert calibrate.most_steps(event, 1e5, 0.1) == from_arguments.MOST_STEPS


@pytest.mark.parametrize("sampling", ["poisson", "fixed-size", "partition"])
@pytest.mark.parametrize(("how_long", "value"), [("steps", 1000), ("epochs", 10.0)])
def test_the_largest_rate_fits_and_a_larger_one_does_not(
    entry: Make, sampling: str, how_long: str, value: float
) -> None:
    event = entry(sampling, 0.5, 1.0, 1).event

    def cost(rate: float) -> float:
        steps = value if how_long == "steps" else math.ceil(value / rate)
        return accountants.epsilon_of([Entry(replace(event, sample_rate=rate), int(steps))], DELTA)

    for epsilon in (0.8, 2.0, 8.0):
        rate = calibrate.largest_rate(event, epsilon, DELTA, **{how_long: value})  # type: ignore[arg-type]
        assert cost(rate) <= epsilon < cost(min(1.0, rate * 1.005))
        assert rate == float(f"{rate:.4e}")


def test_rates_at_the_limits(entry: Make) -> None:
    event = entry("poisson", 0.5, 50.0, 1).event
    assert calibrate.largest_rate(event, 10.0, DELTA, steps=10) == 1.0
    with pytest.raises(ConfigurationError, match="too small for any sample_rate"):
        calibrate.largest_rate(replace(event, noise_multiplier=0.02), 1e-3, 1e-12, steps=10**6)
    with pytest.raises(ConfigurationError, match="either steps or epochs"):
        calibrate.largest_rate(event, 1.0, DELTA)
    with pytest.raises(ConfigurationError, match="sampling='shuffled' is not known"):
        calibrate.largest_rate(entry("shuffled", 0.1, 1.0, 1, period=10).event, 1.0, DELTA, steps=10)


def test_noise_steps_and_rate_are_inverses(entry: Make) -> None:
    event = entry("poisson", 0.01, 1.1, 1).event
    epsilon = accountants.epsilon_of([Entry(event, 2000)], DELTA)
    assert calibrate.smallest_noise(event, 2000, epsilon, DELTA) == pytest.approx(1.1, rel=1e-3)
    assert calibrate.most_steps(event, epsilon, DELTA) == pytest.approx(2000, abs=2)
    assert calibrate.largest_rate(event, epsilon, DELTA, steps=2000) == pytest.approx(0.01, rel=1e-3)
    assert calibrate.largest_rate(event, epsilon, DELTA, epochs=20) == pytest.approx(0.01, rel=2e-3)


def test_extreme_budgets_and_runs_give_a_value_or_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"epsilon must be .*1e\+308"):
        accounting.noise_multiplier(epsilon=1e308, delta=1e-5, sample_rate=0.01, steps=100)
    with pytest.raises(ConfigurationError, match="too small for any sample_rate"):
        accounting.sample_rate(epsilon=3, delta=1e-5, noise_multiplier=1, epochs=1e308)
    assert (
        accounting.steps(epsilon=3, delta=1e-5, sample_rate=0.01, noise_multiplier=1e308) == from_arguments.MOST_STEPS
    )
    assert accounting.sample_rate(epsilon=3, delta=1e-5, noise_multiplier=1e300, epochs=1e8) == 1
