from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from clipwise.accounting.tradeoff import Tradeoff
from clipwise.errors import ConfigurationError

mus = st.floats(0.01, 5.0)
inside = st.floats(0.001, 0.999)


@settings(deadline=None, max_examples=30)
@given(mus, inside)
def test_power_of_a_gaussian(mu: float, fpr: float) -> None:
    exact = special.ndtr(mu + special.ndtri(fpr))
    assert exact - 1e-15 <= Tradeoff.gaussian(mu).power(fpr) <= exact + 1e-4


@settings(deadline=None, max_examples=30)
@given(mus, inside)
def test_accuracy_of_a_gaussian(mu: float, prior: float) -> None:
    """The best guess says "in" above the threshold t = mu / 2 + log((1 - prior) / prior) / mu."""
    t = mu / 2 + math.log((1 - prior) / prior) / mu
    exact = (1 - prior) * special.ndtr(t) + prior * special.ndtr(mu - t)
    assert exact - 1e-15 <= Tradeoff.gaussian(mu).accuracy(prior) <= exact + 1e-4


@settings(deadline=None, max_examples=30)
@given(mus, st.floats(0.01, 1.0))
def test_accuracy_at_even_odds_follows_from_the_advantage(mu: float, rate: float) -> None:
    f = Tradeoff.gaussian(mu).subsample(rate)
    assert f.accuracy(0.5) == pytest.approx((1 + f.advantage()) / 2, abs=1e-12)
    assert f.advantage() == pytest.approx(f.delta(0.0), abs=1e-12)
    assert f.power(0.01) - 0.01 <= f.advantage() + 1e-12


@settings(deadline=None, max_examples=30)
@given(mus, inside, inside)
def test_precision_falls_with_more_false_alarms(mu: float, fpr: float, prior: float) -> None:
    f = Tradeoff.gaussian(mu)
    assert f.precision(fpr, prior) >= f.precision(min(1.0, 1.5 * fpr), prior) - 1e-12
    assert prior - 1e-12 <= f.precision(fpr, prior) <= 1


def gaussian_tail(mu: float, factor: float) -> float:
    """P(loss > log factor) if the unit is in: the loss is N(mu^2 / 2, mu^2)."""
    return float(special.ndtr(mu / 2 - math.log(factor) / mu))


@settings(deadline=None, max_examples=40)
@given(mus, st.floats(1e-6, 0.4))
def test_outcomes_beyond_the_odds_factor_are_as_rare_as_promised(mu: float, tail: float) -> None:
    f = Tradeoff.gaussian(mu)
    factor = f.odds_factor(tail)
    assert gaussian_tail(mu, factor) <= tail
    # No smaller factor follows from the curve alone: some pair with this curve or a higher one reaches it. The
    # Gaussian itself stays well below, within a factor.
    if factor > 1:
        assert gaussian_tail(mu, factor) >= tail / 50
    assert f.posterior(0.5, tail) == pytest.approx(factor / (1 + factor), rel=1e-12)
    assert f.posterior(0.0, tail) == 0


def test_odds_factor_is_least_over_all_supporting_lines() -> None:
    """By brute force over s: e^t = e^s / (1 - delta(s) / tail)."""
    f = Tradeoff.gaussian(1.3).subsample(0.4)
    for tail in (1e-4, 0.01, 0.1):
        found = f.odds_factor(tail)
        s = np.linspace(0, 8, 4001)
        deltas = np.array([f.delta(e) for e in s])
        margin = 1 - deltas / tail
        brute = np.min(np.exp(s[margin > 0]) / margin[margin > 0])
        assert found <= brute * (1 + 1e-12)
        assert found == pytest.approx(brute, rel=1e-4)


def test_pure_differential_privacy_bounds_every_outcome() -> None:
    """(epsilon, 0): the odds never move by more than e^epsilon."""
    f = Tradeoff.from_profile([1.0], [0.0])
    for tail in (1e-9, 1e-3):
        assert f.odds_factor(tail) == pytest.approx(math.e, rel=1e-5)
    assert f.posterior(0.2, 1e-6) == pytest.approx(0.2 * math.e / (0.8 + 0.2 * math.e), rel=1e-5)


def test_extreme_curves() -> None:
    blind, open_book = Tradeoff.identity(), Tradeoff.nothing()
    assert blind.advantage() == 0
    assert blind.power(0.05) == pytest.approx(0.05)
    assert blind.accuracy(0.3) == pytest.approx(0.7)
    assert blind.precision(0.05, 0.3) == pytest.approx(0.3)
    assert blind.odds_factor(0.01) == 1
    assert open_book.advantage() == open_book.accuracy(0.3) == open_book.posterior(0.5, 0.01) == 1
    assert open_book.odds_factor(0.5) == math.inf
    assert open_book.precision(0.0, 0.5) == 1
    assert Tradeoff.from_profile([1.0], [0.1]).odds_factor(0.05) == math.inf


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("power", {"fpr": -0.1}),
        ("accuracy", {"prior": 1.1}),
        ("precision", {"fpr": math.nan}),
        ("odds_factor", {"tail": 0.0}),
        ("posterior", {"prior": 0.5, "tail": 2.0}),
    ],
)
def test_bad_input_is_named(name: str, arguments: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="must be a finite number"):
        getattr(Tradeoff.gaussian(1.0), name)(**arguments)


def test_accuracy_distinguishes_the_orders() -> None:
    """On a curve of one order the prior is that of "in", and a missed "in" is a false negative."""
    f = Tradeoff.gaussian(3.0).diluted(0.5)
    alphas = np.linspace(0, 1, 20_001)
    for prior in (0.2, 0.7):
        brute = 1 - np.min((1 - prior) * alphas + prior * f(alphas))
        assert brute - 1e-15 <= f.accuracy(prior) <= brute + 1e-4
    assert f.accuracy(0.7) < f.inverse().accuracy(0.7) - 0.01
