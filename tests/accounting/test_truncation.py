from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from clipwise.accounting import accountants, calibrate, gaussian, repeat, truncation
from clipwise.accounting.composition import compose
from clipwise.accounting.filter import Filter, best_order, epsilon_at
from clipwise.accounting.tradeoff import of as tradeoff_of
from clipwise.errors import ConfigurationError
from clipwise.privacy import Adjacency, Entry, Event, Sampling, Unit


def exact_excess(size: int, rate: float, limit: int) -> Fraction:
    q = Fraction(rate)
    return sum((math.comb(size, k) * q**k * (1 - q) ** (size - k) for k in range(limit + 1, size + 1)), Fraction(0))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.floats(1e-6, 1), st.data())
def test_excess_is_the_tail_of_the_binomial_from_above(size: int, rate: float, data: st.DataObject) -> None:
    limit = data.draw(st.integers(1, size))
    exact, found = exact_excess(size, rate, limit), truncation.excess(size, rate, limit)
    assert exact <= found <= 1
    assert found <= float(exact) * (1 + 2e-6) + truncation.LEAST


@pytest.mark.parametrize(("size", "rate", "limit"), [(10**4, 1e-3, 2000), (10**9, 1e-6, 10**6), (400, 0.1, 399)])
def test_an_excess_that_underflows_is_not_rounded_to_zero(size: int, rate: float, limit: int) -> None:
    assert stats.binom.logsf(limit, size, rate) < math.log(truncation.LEAST)
    assert truncation.excess(size, rate, limit) == truncation.LEAST
    assert truncation.excess(size, rate, size) == 0


@given(st.integers(1, 10**7), st.floats(1e-7, 1))
def test_the_default_limit_is_exceeded_with_negligible_probability(size: int, rate: float) -> None:
    limit = truncation.default_limit(size, rate)
    assert size * rate <= limit <= size
    assert truncation.excess(size, rate, limit) <= truncation.NEGLIGIBLE * (1 + 1e-5)
    spread = math.sqrt(size * rate * (1 - rate))
    assert limit <= size * rate + 9.7 * spread + 40  # and is not far away


@settings(max_examples=50, deadline=None)
@given(st.floats(0.05, 3), st.floats(-9, -2), st.floats(-14, -3))
def test_epsilon_is_the_left_end_of_what_is_admissible(mu: float, log_delta: float, log_excess: float) -> None:
    delta, excess = 10**log_delta, 10**log_excess

    def admissible(epsilon: float) -> bool:
        return gaussian.delta(epsilon, mu) + (1 + math.exp(epsilon)) * excess <= delta

    found = truncation.epsilon(lambda d: gaussian.epsilon(d, mu), delta, excess)
    if math.isfinite(found):
        assert admissible(found)
        assert found == 0 or not admissible(found * (1 - 1e-4) - 1e-9)
    else:
        # Near the touching point the search may give up.
        assert not any(admissible(e) for e in np.linspace(0, 30, 400) if admissible(e * 1.01 + 1e-3))


def test_no_epsilon_if_truncation_alone_exceeds_delta() -> None:
    assert truncation.epsilon(lambda d: 0.0, 1e-5, 6e-6) == math.inf
    assert truncation.epsilon(lambda d: 0.0, 1e-5, 4e-6) == 0
    assert truncation.epsilon(lambda d: 800.0, 1e-5, 1e-290) == math.inf
    assert truncation.epsilon(lambda d: math.inf, 1e-5, 1e-20) == math.inf
    assert truncation.added_delta(1e6, 1e-290) == 1 and truncation.added_delta(1e6, 0.0) == 0


def hockey_sticks(epsilon: float, limit: int, rate: float, others: int, value: float, z: float) -> float:
    """Exact delta of one truncated step, both directions: one unit of value 1 beside `others` of another value."""
    x = np.linspace(-12 * z + min(0, others * value), 12 * z + max(1.0, others * value), 200_001)
    law = stats.binom(others, rate)

    def density(sums: dict[float, float]) -> np.ndarray:
        return sum(mass * stats.norm.pdf(x, mean, z) for mean, mass in sums.items())  # type: ignore[return-value]

    without: dict[float, float] = {}
    present: dict[float, float] = {}
    for k in range(others + 1):
        mass = law.pmf(k)
        cut = min(k, limit) * value
        without[cut] = without.get(cut, 0) + mass
        present[cut] = present.get(cut, 0) + mass * (1 - rate)
        kept = min(1.0, limit / (k + 1))  # the unit is drawn; is it kept?
        drawn = min(k + 1, limit)
        for total, share in (((drawn - 1) * value + 1, kept), (drawn * value, 1 - kept)):
            present[total] = present.get(total, 0) + mass * rate * share
    p, q = density(present), density(without)
    step = x[1] - x[0]
    growth = math.exp(epsilon)
    return max(float(np.maximum(a - growth * b, 0).sum() * step) for a, b in ((p, q), (q, p)))


@pytest.mark.parametrize("value", [-1.0, 0.0, 1.0])
def test_a_truncated_step_costs_no_more_than_accounted(value: float) -> None:
    """The other units are within the same bound, and decide whether the given unit is kept."""
    rate, others, limit, z, plain_is_passed = 0.2, 2, 1, 1.0, False
    excess = truncation.excess(others + 1, rate, limit)
    event = Event(Sampling.TRUNCATED_POISSON, Adjacency.ZERO_OUT, Unit.RECORD, z, rate, 1, excess)
    for epsilon in (0.0, 1.0, 2.0):
        exact = hockey_sticks(epsilon, limit, rate, others, value, z)
        assert exact <= accountants.delta_of([Entry(event, 1)], epsilon) * (1 + 1e-6)
        plain = float(gaussian.hockey_stick(np.array([epsilon]), rate, z)[0])
        plain_is_passed = plain_is_passed or exact > plain * (1 + 1e-6)
    assert plain_is_passed == (value == -1.0)  # so the added cost of truncation is needed


@pytest.mark.slow
def test_truncation_adds_up_over_a_history(entry: Callable[..., Entry]) -> None:
    event = Event(Sampling.TRUNCATED_POISSON, Adjacency.ZERO_OUT, Unit.RECORD, 1.0, 0.01, 1, 1e-11)
    cut, plain = [Entry(event, 600), Entry(event, 400)], [entry("poisson", 0.01, 1.0, 1000)]
    for accountant in ("pld", "rdp", "dp-accounting"):
        added = accountants.delta_of(cut, 2.0, accountant) - accountants.delta_of(plain, 2.0, accountant)
        assert added == pytest.approx((1 + math.exp(2)) * 1e-8, rel=1e-3)
        assert accountants.epsilon_of(cut, 1e-5, accountant) > accountants.epsilon_of(plain, 1e-5, accountant)
        assert accountants.delta_of(cut, accountants.epsilon_of(cut, 1e-5, accountant), accountant) <= 1e-5 * (1 + 1e-9)
    none = [Entry(Event(Sampling.TRUNCATED_POISSON, Adjacency.ZERO_OUT, Unit.RECORD, 1.0, 0.01), 1000)]
    assert accountants.epsilon_of(none, 1e-5) == accountants.epsilon_of(plain, 1e-5)
    always = [Entry(Event(Sampling.TRUNCATED_POISSON, Adjacency.ZERO_OUT, Unit.RECORD, 1.0, 1.0, 1, 1.0), 1)]
    assert accountants.epsilon_of(always, 1e-5) == math.inf and accountants.delta_of(always, 1.0) == 1


def full(z: float, failure: float) -> Event:
    return Event(Sampling.FULL, Adjacency.ZERO_OUT, Unit.RECORD, z, 1.0, excess=failure)


def exact_delta_with_failure(epsilon: float, mu: float, failure: float) -> float:
    """Both directions for (1 - F) N(mu, 1) + F (elsewhere) against N(0, 1)."""
    shift = math.log1p(-failure)
    forwards = failure + (1 - failure) * gaussian.delta(epsilon - shift, mu)
    backwards = stats.norm.cdf(mu / 2 - (epsilon + shift) / mu) - math.exp(epsilon + shift) * stats.norm.cdf(
        -mu / 2 - (epsilon + shift) / mu
    )
    return max(forwards, float(backwards))


@settings(max_examples=60, deadline=None)
@given(st.floats(0.05, 3), st.floats(0, 5), st.floats(-10, -0.5))
def test_a_failing_release_costs_its_closed_form(mu: float, epsilon: float, log_failure: float) -> None:
    failure = 10**log_failure
    found = accountants.delta_of([Entry(full(1 / mu, failure), 1)], epsilon)
    exact = exact_delta_with_failure(epsilon, mu, failure)
    assert exact <= found * (1 + 1e-9)
    assert found <= exact + failure / (1 - failure) + 1e-12


@pytest.mark.parametrize("accountant", ["pld", "rdp", "zcdp", "gdp", "dp-accounting"])
def test_every_accountant_takes_failures_from_delta(accountant: str) -> None:
    history = [Entry(full(3.0, 1e-6), 2)]
    failing = accountants.epsilon_of(history, 1e-5, accountant)
    never = [Entry(full(3.0, 0.0), 2)]
    cost = 2e-6 / (1 - 2e-6)
    assert accountants.epsilon_of(never, 1e-5 - cost, accountant) <= failing
    assert failing <= accountants.epsilon_of(never, (1e-5 - cost) * (1 - 1e-6), accountant) * (1 + 1e-5)
    assert accountants.epsilon_of(history, 1.9e-6, accountant) == math.inf
    added = accountants.delta_of(history, 1.0, accountant) - accountants.delta_of(never, 1.0, accountant)
    assert added == pytest.approx(cost, rel=1e-6)


def test_failures_are_in_the_tradeoff_the_filter_and_the_search() -> None:
    history = [Entry(full(3.0, 1e-3), 1)]
    assert tradeoff_of(history)(0.0) <= 1 - 1e-3
    assert tradeoff_of(history).delta(2.0) >= exact_delta_with_failure(2.0, 1 / 3, 1e-3)
    order = best_order(history[0], 1e-5)
    assert math.isfinite(epsilon_at(order, [Entry(full(3.0, 9e-9), 1)], 1e-5))
    assert epsilon_at(order, [Entry(full(3.0, 2e-8), 1)], 1e-5) == math.inf  # beyond the share of delta that is kept
    with pytest.raises(ConfigurationError, match="truncate its batch or fail"):
        Filter(1.0, 1e-5, order=order).charge(full(30.0, 1e-12))
    allowed = Filter(1.0, 1e-5, plan=[Entry(full(30.0, 1e-10), 1)])
    allowed.charge(full(30.0, 1e-10))
    assert not allowed.allows(full(30.0, 1e-8))
    searched = [repeat.epsilon(compose([Entry(full(3.0, f), 1)]), 1e-2, repeat.Repetitions(2.0)) for f in (0.0, 1e-3)]
    assert searched[0] < searched[1]


def test_noise_is_calibrated_beside_failures() -> None:
    z = calibrate.smallest_noise(full(1.0, 1e-6), 1, 1.0, 1e-5)
    assert accountants.epsilon_of([Entry(full(z, 1e-6), 1)], 1e-5) <= 1
    with pytest.raises(ConfigurationError, match="delta=1e-05 is too small for releases that fail"):
        calibrate.smallest_noise(full(1.0, 1e-5), 1, 1.0, 1e-5)
