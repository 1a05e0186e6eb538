"""Bounds from guesses, compared with other computations and with simulations."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from clipwise.accounting import gaussian
from clipwise.audit import bounds

counts = st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))
failures = st.floats(1e-9, 0.4)


@given(counts, failures)
def test_clopper_and_pearson_are_those_of_scipy(counted: tuple[int, int], failure: float) -> None:
    k, n = counted
    interval = stats.binomtest(k, n).proportion_ci(1 - 2 * failure, method="exact")
    assert bounds.at_least(k, n, failure) == pytest.approx(interval.low, abs=1e-9)
    assert bounds.at_most(k, n, failure) == pytest.approx(interval.high, abs=1e-9)


@given(counts, failures)
def test_at_the_lower_bound_the_observation_has_the_given_probability(counted: tuple[int, int], failure: float) -> None:
    k, n = counted
    p = bounds.at_least(k, n, failure)
    assert (p == 0.0) == (k == 0)
    if k:
        assert stats.binom.sf(k - 1, n, p) == pytest.approx(failure, rel=1e-6)


@given(st.floats(0.1, 5.0), st.floats(-3.0, 3.0))
def test_a_test_of_a_gaussian_mechanism_shows_no_more_epsilon_than_it_has(mu: float, threshold: float) -> None:
    alpha, beta = float(stats.norm.sf(threshold)), float(stats.norm.cdf(threshold - mu))
    for delta in (1e-5, 1e-2):
        assert bounds.epsilon_of_errors(alpha, beta, delta) <= gaussian.epsilon(delta, mu) + 1e-6


@given(st.floats(0.05, 6.0))
def test_the_test_at_the_midpoint_attains_mu(mu: float) -> None:
    assert bounds.mu_of_accuracy(float(stats.norm.cdf(mu / 2))) == pytest.approx(mu, rel=1e-6)


def test_random_guesses_give_a_bound_of_zero() -> None:
    assert bounds.mu_of_accuracy(0.4) == 0.0
    assert bounds.epsilon_of_errors(0.5, 0.5, 1e-5) == 0.0
    assert bounds.epsilon_in_one_run(100, 50, 100, 0.0, 0.05) == 0.0


def test_a_test_without_errors_shows_that_there_is_no_privacy() -> None:
    assert bounds.epsilon_of_errors(0.0, 0.5, 1e-5) == math.inf


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_randomized_response_is_seldom_overestimated_in_one_run(epsilon: float) -> None:
    """The mechanism that makes the bound tight: each bit is reported correctly with probability e^eps / (1 + e^eps)."""
    random = np.random.default_rng(0)
    m, failure = 200, 0.05
    right = random.binomial(m, 1 / (1 + math.exp(-epsilon)), size=400)
    found = np.array([bounds.epsilon_in_one_run(m, int(k), m, 0.0, failure) for k in right])
    # More than 40 of 400 bounds with failure probability 1/20 fail with probability 1e-5.
    assert (found > epsilon).sum() <= 40
    assert np.median(found) > 0.4 * epsilon


@given(st.integers(2, 60), st.integers(0, 60), st.floats(0.0, 6.0), st.floats(0.0, 1e-2))
def test_a_larger_delta_explains_more(m: int, right: int, epsilon: float, delta: float) -> None:
    right = min(right, m)
    plain = bounds.p_value_in_one_run(m, right, m, epsilon, 0.0)
    assert plain <= bounds.p_value_in_one_run(m, right, m, epsilon, delta) <= 1.0


@pytest.mark.parametrize("delta", [1e-4, 0.01, 0.2])
@pytest.mark.parametrize("m", [3, 20])
def test_the_extra_term_covers_revealed_canaries(m: int, delta: float) -> None:
    """Two mechanisms that are (0, delta)-private for each canary: all are revealed together, or each independently."""
    for right in range(1, m + 1):
        by_chance = stats.binom.sf(right - 1, m, 0.5)
        all_at_once = delta + (1 - delta) * by_chance
        each_by_itself = stats.binom.sf(right - 1, m, 0.5 + delta / 2)
        bound = bounds.p_value_in_one_run(m, right, m, 0.0, delta)
        assert bound >= min(1.0, max(all_at_once, each_by_itself)) - 1e-12


def test_mu_in_one_run_is_below_that_of_a_run_that_gives_it() -> None:
    random = np.random.default_rng(1)
    for mu in (1.0, 3.0):
        m = 400
        inside = random.random(m) < 0.5
        order = np.argsort(random.normal(size=m) + mu * inside)
        half = 20
        right = int((~inside[order[:half]]).sum() + inside[order[-half:]].sum())
        found = bounds.mu_in_one_run(2 * half, right, m, 1e-3)
        assert 0.05 < found < mu


@given(st.floats(-8.0, 8.0), st.floats(-5.0, 5.0).filter(lambda a: abs(a) > 1e-3), st.floats(0.01, 1.0))
def test_log_ratios_are_those_of_the_densities(x: float, shift: float, rate: float) -> None:
    found = float(bounds.log_ratio(np.array([x]), shift, rate)[0])
    mixture = (1 - rate) * stats.norm.pdf(x) + rate * stats.norm.pdf(x - shift)
    assert found == pytest.approx(math.log(mixture / stats.norm.pdf(x)), rel=1e-6, abs=1e-9)
