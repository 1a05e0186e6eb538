from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipwise.accounting import gaussian


def exact_hockey_stick(epsilon: float, rate: float, z: float) -> mpmath.mpf:
    """The textbook formula in 60 digits."""
    with mpmath.workdps(60):
        e, q, s = mpmath.mpf(epsilon), mpmath.mpf(rate), mpmath.mpf(z)
        r = mpmath.e**e - 1 + q
        if r <= 0:
            return 1 - mpmath.e**e
        t = s * s * mpmath.log(r / q) + mpmath.mpf(1) / 2

        def sf(x: mpmath.mpf) -> mpmath.mpf:
            return mpmath.erfc(x / mpmath.sqrt(2)) / 2

        return q * sf((t - 1) / s) - r * sf(t / s)


@pytest.mark.parametrize("rate", [1e-10, 1e-5, 0.01, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("z", [0.01, 0.1, 0.5, 1.0, 5.0, 100.0])
def test_hockey_stick_keeps_its_digits_everywhere(rate: float, z: float) -> None:
    largest = gaussian.loss_at(gaussian.TAIL, rate, z)
    lowest = 1.1 * math.log1p(-rate) if rate < 1 else -largest
    for epsilons, relative in [(np.linspace(0, largest, 9), 1e-9), (np.linspace(lowest, 0, 6), None)]:
        found = gaussian.hockey_stick(epsilons, rate, z)
        for epsilon, delta in zip(epsilons, found, strict=True):
            exact = exact_hockey_stick(epsilon, rate, z)
            tolerance = relative * exact if relative else 1e-15
            assert abs(mpmath.mpf(float(delta)) - exact) <= tolerance + 1e-300


def test_loss_moments_agree_with_a_plain_integral() -> None:
    rate, z = 0.1, 0.8
    x = np.linspace(-12 * z, 1 + 12 * z, 200_001)
    q_density = np.exp(-0.5 * (x / z) ** 2)
    p_density = (1 - rate) * q_density + rate * np.exp(-0.5 * ((x - 1) / z) ** 2)
    losses = np.log(p_density / q_density)
    weights = p_density / p_density.sum()
    mean = weights @ losses
    assert gaussian.loss_moments(rate, z) == pytest.approx((mean, weights @ (losses - mean) ** 2), rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.floats(-4, 6).map(lambda x: 10**x), st.floats(-14, -0.01).map(lambda x: 10**x))
def test_epsilon_is_the_smallest_and_rounded_up(mu: float, delta: float) -> None:
    epsilon = gaussian.epsilon(delta, mu)
    assert gaussian.delta(epsilon, mu) <= delta
    if epsilon > 0:
        assert gaussian.delta(epsilon * (1 - 1e-6), mu) > delta
        assert gaussian.largest_mu(epsilon, delta) == pytest.approx(mu, rel=1e-6)


@pytest.mark.parametrize(("mu", "epsilon"), [(0.0, 0.0), (1.0, 4.3771780957), (1e200, math.inf), (math.inf, math.inf)])
def test_known_values(mu: float, epsilon: float) -> None:
    assert gaussian.epsilon(1e-5, mu) == pytest.approx(epsilon, rel=1e-9)


@pytest.mark.parametrize("mu", [1e12, 1e20])
def test_a_huge_mu_is_still_bounded_from_above(mu: float) -> None:
    """The exact value is mu^2 / 2 + 4.26 mu, where the second term is lost in the first."""
    assert gaussian.epsilon(1e-5, mu) > mu * mu / 2


def exact_back(epsilon: float, rate: float, z: float) -> mpmath.mpf:
    """The curve of the other order, by the textbook formula in 60 digits."""
    with mpmath.workdps(60):
        e, q, s = mpmath.mpf(epsilon), mpmath.mpf(rate), mpmath.mpf(z)
        r = mpmath.exp(-e) - 1 + q
        if r <= 0:
            return mpmath.mpf(0)
        t = s * s * mpmath.log(r / q) + mpmath.mpf(1) / 2

        def cdf(x: mpmath.mpf) -> mpmath.mpf:
            return mpmath.erfc(-x / mpmath.sqrt(2)) / 2

        return mpmath.exp(e) * (r * cdf(t / s) - q * cdf((t - 1) / s))


@settings(max_examples=150, deadline=None)
@given(st.floats(-12, -1e-9).map(lambda x: 10**x), st.floats(-2, 6).map(lambda x: 10**x), st.floats(-5, 37))
def test_both_curves_keep_their_promised_precision(rate: float, z: float, deviations: float) -> None:
    with mpmath.workdps(60):
        epsilon = max(0.0, gaussian.loss_at(deviations, rate, z))
        found = mpmath.mpf(float(gaussian.hockey_stick(np.array([epsilon]), rate, z)[0]))
        exact = exact_hockey_stick(epsilon, rate, z)
        assert abs(found - exact) <= 0.5 * gaussian.precision(z) * exact + 1e-305
        epsilon = max(0.0, -float(gaussian.loss(np.array([-deviations * z]), rate, z)[0]))
        back = mpmath.mpf(float(gaussian.hockey_stick_back(np.array([epsilon]), rate, z)[0]))
        assert back >= exact_back(epsilon, rate, z) * (1 - 0.5 * gaussian.precision(z)) - 1e-305


@settings(max_examples=60, deadline=None)
@given(st.floats(-7, 8).map(lambda x: 10**x), st.floats(-30, -0.1).map(lambda x: 10**x))
def test_the_closed_form_is_rounded_up(mu: float, delta: float) -> None:
    epsilon = gaussian.epsilon(delta, mu)
    with mpmath.workdps(80):
        e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)
        true = mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)
        assert true <= delta
