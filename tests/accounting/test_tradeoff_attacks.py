from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from clipwise.accounting.tradeoff import Tradeoff
from clipwise.errors import ConfigurationError
from tests.accounting.curve_algebra import subsampled

mus = st.floats(0.01, 5.0)
inside = st.floats(0.001, 0.999)


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(mus, inside)
def test_power_of_a_gaussian(mu: float, fpr: float) -> None:
    exact = special.ndtr(mu + special.ndtri(fpr))
    assert exact - 1e-15 <= Tradeoff.gaussian(mu).power(fpr) <= exact + 1e-4


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(mus, inside)
def test_accuracy_of_a_gaussian(mu: float, prior: float) -> None:
    """The best guess says "in" above the threshold t = mu / 2 + log((1 - prior) / prior) / mu."""
    t = mu / 2 + math.log((1 - prior) / prior) / mu
    exact = (1 - prior) * special.ndtr(t) + prior * special.ndtr(mu - t)
    assert exact - 1e-15 <= Tradeoff.gaussian(mu).accuracy(prior) <= exact + 1e-4


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(mus, st.floats(0.01, 1.0))
def test_accuracy_at_even_odds_follows_from_the_advantage(mu: float, rate: float) -> None:
    f = subsampled(Tradeoff.gaussian(mu), rate)
    assert f.accuracy(0.5) == pytest.approx((1 + f.advantage()) / 2, abs=1e-12)
    assert f.advantage() == pytest.approx(f.delta(0.0), abs=1e-12)
    assert f.power(0.01) - 0.01 <= f.advantage() + 1e-12


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(mus, inside, inside)
def test_precision_falls_with_more_false_alarms(mu: float, fpr: float, prior: float) -> None:
    f = Tradeoff.gaussian(mu)
    assert f.precision(fpr, prior) >= f.precision(min(1.0, 1.5 * fpr), prior) - 1e-12
    assert prior - 1e-12 <= f.precision(fpr, prior) <= 1


def test_extreme_curves() -> None:
    blind, open_book = Tradeoff.identity(), Tradeoff.nothing()
    assert blind.advantage() == 0
    assert blind.power(0.05) == pytest.approx(0.05)
    assert blind.accuracy(0.3) == pytest.approx(0.7)
    assert blind.precision(0.05, 0.3) == pytest.approx(0.3)
    assert open_book.advantage() == open_book.accuracy(0.3) == 1
    assert open_book.precision(0.0, 0.5) == 1


@pytest.mark.parametrize(
    ("name", "arguments"), [("power", {"fpr": -0.1}), ("accuracy", {"prior": 1.1}), ("precision", {"fpr": math.nan})]
)
def test_bad_input_is_named(name: str, arguments: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="must be a finite number"):
        getattr(Tradeoff.gaussian(1.0), name)(**arguments)
