from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipwise.accounting import gaussian, gdp, zcdp
from clipwise.accounting.composition import compose
from clipwise.privacy import Entry

Make = Callable[..., Entry]
deltas = st.floats(-30, -1).map(lambda x: 10**x)


def test_rho_adds_up_over_releases_and_passes(entry: Make) -> None:
    history = [entry("full", 1.0, 2.0, 8), entry("shuffled", 0.1, 3.0, 25, period=10)]
    assert zcdp.rho(compose(history)) == pytest.approx(8 / (2 * 4) + 3 / (2 * 9))  # 25 steps of 10 are 3 passes
    assert zcdp.rho(compose([])) == 0
    assert zcdp.rho(compose([entry("full", 1.0, 0.0, 1)])) == math.inf


@settings(max_examples=60, deadline=None)
@given(st.floats(-8, 3).map(lambda x: 10**x), deltas)
def test_the_tight_conversion_lies_between_the_exact_value_and_the_paper(rho: float, delta: float) -> None:
    found = zcdp.tight_epsilon(rho, delta)
    of_the_paper = rho + 2 * math.sqrt(-rho * math.log(delta))  # Bun and Steinke, 2016
    assert gaussian.epsilon(delta, math.sqrt(2 * rho)) <= found <= of_the_paper * (1 + 1e-14)
    assert gaussian.delta(found, math.sqrt(2 * rho)) <= zcdp.tight_delta(rho, found) <= delta * (1 + 1e-6)


@pytest.mark.parametrize(("rho", "delta"), [(0.5, 1e-5), (1e-4, 1e-6), (20.0, 1e-9)])
def test_the_tight_conversion_is_the_best_of_all_orders(rho: float, delta: float) -> None:
    excess = np.geomspace(1e-3, 1e5, 400_000)  # alpha - 1
    bounds = rho * (1 + excess) + np.log(excess / (1 + excess)) - (math.log(delta) + np.log1p(excess)) / excess
    assert zcdp.tight_epsilon(rho, delta) == pytest.approx(bounds.min(), rel=1e-7)
    epsilon = 1.3 * float(bounds.min())
    logs = excess * (rho * (1 + excess) - epsilon) + excess * np.log(excess) - (1 + excess) * np.log1p(excess)
    assert zcdp.tight_delta(rho, epsilon) == pytest.approx(math.exp(logs.min()), rel=1e-5)


@pytest.mark.parametrize("rho", [1e-300, 1e-30, 1e-12, 1e5, 1e30, 1e300])
@pytest.mark.parametrize("delta", [1e-300, 1e-30, 0.5, 0.999999])
def test_extreme_inputs_are_bounded(rho: float, delta: float) -> None:
    epsilon = zcdp.tight_epsilon(rho, delta)
    assert 0 <= epsilon < math.inf
    assert 0 <= zcdp.tight_delta(rho, epsilon) <= 1
    assert zcdp.tight_delta(rho, 1e300) <= 1 and 0 <= zcdp.tight_delta(rho, 0.0) <= 1


def test_an_empty_history_and_no_noise(entry: Make) -> None:
    nothing, silent = compose([]), compose([entry("full", 1.0, 0.0, 1)])
    for accountant in (zcdp, gdp):
        assert accountant.epsilon(nothing, 1e-5) == 0 and accountant.delta(nothing, 0.0) == 0
        assert accountant.epsilon(silent, 1e-5) == math.inf and accountant.delta(silent, 100.0) == 1


def test_gdp_is_exact(entry: Make) -> None:
    total = compose([entry("full", 1.0, 3.0, 9), entry("shuffled", 0.05, 2.0, 41, period=20)])
    mu = math.sqrt(9 / 9 + 3 / 4)
    assert gdp.mu(total) == pytest.approx(mu, rel=1e-14)
    assert gdp.epsilon(total, 1e-5) == pytest.approx(gaussian.epsilon(1e-5, mu), rel=1e-12)
    assert gdp.delta(total, 1.0) == pytest.approx(gaussian.delta(1.0, mu), rel=1e-12)
