from __future__ import annotations

import math
from itertools import pairwise

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipwise.accounting import gaussian
from clipwise.accounting.losses import Losses, both_orders, connect_dots, grid

PAIR = Losses(0.5, -1, np.array([0.3, 0.1, 0.4, 0.15]), 0.05)


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 3), st.floats(0.051, 0.9))
def test_delta_and_epsilon_by_the_definition(epsilon: float, delta: float) -> None:
    losses = grid(-1, 2, 0.5)
    by_hand = PAIR.lost + sum(m * max(0.0, 1 - math.exp(epsilon - x)) for m, x in zip(PAIR.masses, losses, strict=True))
    assert PAIR.delta(epsilon) == pytest.approx(by_hand, abs=1e-14)
    smallest = PAIR.epsilon(delta)
    assert PAIR.delta(smallest) <= delta + 1e-12
    if smallest > 0:
        assert PAIR.delta(smallest - 1e-6) > delta


def test_more_lost_than_delta_is_an_infinite_epsilon() -> None:
    assert PAIR.epsilon(0.049) == math.inf


def test_all_losses_positive() -> None:
    certain = Losses(0.25, 4, np.array([1.0]), 0.0)
    assert certain.epsilon(1e-9) == pytest.approx(1.0, abs=1e-8)


def curves(rate: float, z: float, interval: float) -> tuple[np.ndarray, np.ndarray]:
    last = math.ceil(gaussian.loss_at(gaussian.TAIL, rate, z) / interval) + 1
    points = grid(0, last, interval)
    up = 1 + gaussian.precision(z)
    return gaussian.hockey_stick(points, rate, z) * up, gaussian.hockey_stick_back(points, rate, z) * up


def true_delta(epsilon: float, rate: float, z: float, back: bool) -> float:
    """Of either order and any sign of epsilon, by delta(-e) of one order = 1 - e^-e (1 - delta(e) of the other)."""
    curve = gaussian.hockey_stick_back if back else gaussian.hockey_stick
    if epsilon >= 0:
        return float(curve(np.array([epsilon]), rate, z)[0])
    return 1 - math.exp(epsilon) * (1 - true_delta(-epsilon, rate, z, not back))


@settings(max_examples=30, deadline=None)
@given(
    st.floats(-6, -0.01).map(lambda x: 10**x),
    st.floats(0.3, 5),
    st.sampled_from([2.0**-1, 2.0**-4, 2.0**-7]),
    st.floats(-1, 1),
)
def test_both_pairs_dominate_the_true_ones(rate: float, z: float, interval: float, at: float) -> None:
    pairs = both_orders(*curves(rate, z, interval), interval)
    epsilon = at * gaussian.loss_at(gaussian.TAIL, rate, z)
    for back, losses in enumerate(pairs):
        true = true_delta(epsilon, rate, z, bool(back))
        assert losses.delta(epsilon) >= true * (1 - 1e-12) - 1e-16
        assert losses.masses.sum() + losses.lost == pytest.approx(1, abs=1e-9)
        assert losses.masses.sum() + losses.lost >= 1 - 1e-15


def test_the_curve_passes_through_the_dots() -> None:
    interval = 2.0**-4
    forward, back = curves(0.2, 1.0, interval)
    for deltas, losses in zip((forward, back), both_orders(forward, back, interval), strict=True):
        found = [losses.delta(i * interval) for i in range(len(deltas))]
        assert found == pytest.approx(list(deltas), rel=1e-8, abs=1e-14)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([2.0**-3, 2.0**-12, 2.0**-30]))
def test_masses_are_rounded_up(seed: int, interval: float) -> None:
    """Compared with exact arithmetic on the same deltas."""
    rng = np.random.default_rng(seed)
    deltas = np.sort(rng.random(12))[::-1].copy()
    masses, added = connect_dots(deltas, interval)
    with mpmath.workdps(60):
        exact = [mpmath.mpf(float(d)) for d in deltas]
        grow = mpmath.e ** mpmath.mpf(interval)
        drops = [a - b for a, b in pairwise(exact)] + [mpmath.mpf(0)]
        true = [(grow * drops[i - 1] - drops[i]) / (grow - 1) for i in range(1, len(exact))]
        assert all(mpmath.mpf(float(m)) >= max(t, 0) for m, t in zip(masses, true, strict=True))
    assert added >= 0


def test_a_curve_that_rises_by_rounding_is_lowered() -> None:
    masses, _ = connect_dots(np.array([0.5, 0.2, np.nextafter(0.2, 1), 0.1]), 0.5)
    assert np.all(masses >= 0) and np.all(np.isfinite(masses))


def test_a_symmetric_pair_is_the_same_in_both_orders() -> None:
    curve, _ = curves(1.0, 2.0, 2.0**-5)
    one, other = both_orders(curve, curve, 2.0**-5)
    assert one.first == other.first and np.array_equal(one.masses, other.masses)
    assert isinstance(one, Losses) and one.lost == other.lost
