"""Closed forms of one Gaussian release on a sampled batch, to which every scheme reduces.

A unit takes part with probability q and then moves a sum with noise N(0, z^2) by 1. The worst pair of outputs is

    P = (1 - q) N(0, z^2) + q N(1, z^2)   against   Q = N(0, z^2),

with privacy loss l(x) = log(1 - q + q exp((x - 1/2) / z^2)), which increases with x. q = 1 is the Gaussian
mechanism: its T-fold composition is one too, with mu = sensitivity / noise = sqrt(T) / z.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[np.float64]

# A Gaussian is further than this many standard deviations out with probability 1e-19.
TAIL = 9.0
# Below this mu only delta(0), which is 0.4 mu, is returned.
SMALLEST_MU = 1e-8
# From here on e^epsilon is not computed, because it could overflow.
LARGE_LOSS = 30.0


def loss(x: Array, rate: float, z: float) -> Array:
    """The privacy loss of the outputs x."""
    y = (x - 0.5) / z**2
    moderate = np.log1p(rate * np.expm1(np.minimum(y, LARGE_LOSS)))
    large = y + np.log(rate + (1 - rate) * np.exp(-np.maximum(y, LARGE_LOSS)))
    return np.where(y < LARGE_LOSS, moderate, large)


def loss_at(deviations: float, rate: float, z: float) -> float:
    """The privacy loss of an output `deviations` standard deviations beyond the moved mean."""
    return float(loss(np.array([1 + deviations * z]), rate, z)[0])


def loss_moments(rate: float, z: float) -> tuple[float, float]:
    """Mean and variance of the privacy loss under P, by a sum over a grid of outputs."""
    x = np.arange(-TAIL * z, 1 + TAIL * z, 0.1 * z)
    density = (1 - rate) * np.exp(-0.5 * (x / z) ** 2) + rate * np.exp(-0.5 * ((x - 1) / z) ** 2)
    weights = density / density.sum()
    losses = loss(x, rate, z)
    mean = float(weights @ losses)
    return mean, float(weights @ (losses - mean) ** 2)


def hockey_stick(epsilons: Array, rate: float, z: float) -> Array:
    """delta(epsilon) = sup_S P(S) - e^epsilon Q(S), for any real epsilon.

    The supremum is at S = {l > epsilon} = {x > t}. With r = (e^epsilon - 1 + q) / q it is q (sf(a) - r sf(b)),
    where t = z^2 log r + 1/2, a = (t - 1) / z and b = t / z. There pdf(a) = r pdf(b), so in the tail both terms
    are written as pdf(a) times Mills' ratio sf / pdf: nothing overflows, no digits are lost. For epsilon >= 0
    the relative error is at most `precision(z)`.
    """
    large = epsilons > LARGE_LOSS
    excess = np.expm1(np.where(large, 0.0, epsilons)) / rate
    with np.errstate(divide="ignore"):  # r <= 0: every output has a larger loss, so t = -inf
        log_r = np.log1p(np.maximum(excess, -1.0))
    log_r = np.where(large, epsilons + np.log1p((rate - 1) * np.exp(-np.abs(epsilons))) - math.log(rate), log_r)
    b = z * log_r + 0.5 / z
    a = b - 1 / z
    density = np.exp(-0.5 * np.minimum(np.abs(a), 50.0) ** 2)  # 0 from there on
    under_p = np.where(a > 0, density * _half_erfcx(a), special.ndtr(-a))
    under_q = np.where(b > 0, density * _half_erfcx(b), (1 + excess) * special.ndtr(-b))
    deltas: Array = np.clip(rate * (under_p - under_q), 0.0, 1.0)
    return deltas


def hockey_stick_back(epsilons: Array, rate: float, z: float) -> Array:
    """The curve of the other order, sup_S Q(S) - e^epsilon P(S), for epsilon >= 0.

    The supremum is at S = {x < t}. With r = (e^-epsilon - 1 + q) / q and t, a, b as above it is
    e^epsilon q (r cdf(b) - cdf(a)), and 0 if r <= 0: no loss exceeds -log(1 - q). Near that loss r loses digits; it is
    rounded up, which gives the curve of a smaller epsilon.
    """
    small = np.exp(-epsilons)
    # r - 1 from e^-epsilon - 1 while that is small, r from e^-epsilon beyond: each is accurate there.
    near = epsilons < math.log(2)
    excess = np.expm1(-epsilons) / rate + 2.0**-50
    r = np.where(near, 1 + excess, (small - (1 - rate) + 2.0**-50 * small) / rate)
    possible = r > 0
    log_r = np.where(near, np.log1p(np.where(r > 0, excess, 0.0)), np.log(np.where(r > 0, r, 1.0)))
    b = z * log_r + 0.5 / z
    a = b - 1 / z
    density = np.exp(-0.5 * np.minimum(np.abs(a), 50.0) ** 2)  # 0 from there on
    under_q = np.where(b < 0, density * _half_erfcx(-b), r * special.ndtr(b))
    under_p = np.where(b < 0, density * _half_erfcx(-a), special.ndtr(a))
    factor = rate * np.exp(np.where(possible, epsilons, 0.0))
    deltas: Array = np.where(possible, np.clip(factor * (under_q - under_p), 0.0, 1.0), 0.0)
    return deltas


def precision(z: float) -> float:
    """A bound on the relative error of both curves at epsilon >= 0, up to 38 standard deviations out.

    exp(-a^2 / 2) turns the error a u + u / z of a into a^2 u + a u / z, and the difference of two Mills' ratios at
    arguments 1 / z apart turns u into (a + 1) z u. For a up to 38 and u = 2^-53 the factor 2^12 is enough; errors
    against 80 digits are at most a fifth of it.
    """
    return 2.0**-41 * (1 + z + 1 / z)


def _half_erfcx(x: Array) -> Array:
    """sf(x) / exp(-x^2 / 2) for x > 0: Mills' ratio without its constant."""
    ratio: Array = 0.5 * special.erfcx(np.maximum(x, 0.0) / math.sqrt(2))
    return ratio


def delta(epsilon: float, mu: float) -> float:
    """The smallest delta of the Gaussian mechanism with sensitivity / noise = mu, rounded up."""
    if mu == 0 or math.isinf(mu):
        return 0.0 if mu == 0 else 1.0
    at_zero = 0.4 * mu  # delta(0) = 2 cdf(mu / 2) - 1 < 2 pdf(0) mu / 2
    if mu < SMALLEST_MU:
        return at_zero
    # A large mu leaves an error of u epsilon / mu in a = epsilon / mu - mu / 2: a smaller epsilon covers it.
    found = float(hockey_stick(np.array([epsilon * (1 - 2.0**-48)]), 1.0, 1 / mu)[0])
    return min(1.0, at_zero, found * (1 + precision(max(1 / mu, 0.01))))


def epsilon(delta_: float, mu: float) -> float:
    """The smallest epsilon of the Gaussian mechanism with sensitivity / noise = mu, rounded up."""
    # delta(epsilon) <= P(l > epsilon) = sf(epsilon / mu - mu / 2), which bounds the answer from above.
    enough = max(0.0, mu * (mu / 2 - float(special.ndtri(delta_)))) * (1 + 1e-12)
    if math.isinf(enough):
        return math.inf
    if delta(0.0, mu) <= delta_:
        return 0.0
    return _bisect(lambda e: delta(e, mu) <= delta_, good=enough, bad=0.0)


def largest_mu(epsilon_: float, delta_: float) -> float:
    """The largest mu for which a Gaussian mechanism is (epsilon, delta)-private, rounded down."""
    # By the same bound, mu (mu / 2 + c) <= epsilon with c = ndtri(1 - delta) is enough.
    c = -float(special.ndtri(delta_))
    good = 2 * epsilon_ / (c + math.sqrt(c * c + 2 * epsilon_)) * (1 - 1e-12)
    bad = 2 * good
    while delta(epsilon_, bad) <= delta_:
        bad *= 2
    return _bisect(lambda m: delta(epsilon_, m) <= delta_, good=good, bad=bad)


def _bisect(holds: Callable[[float], bool], good: float, bad: float) -> float:
    """A point next to the boundary between `good`, where `holds` is true, and `bad`; it is true there."""
    while abs(good - bad) > 1e-12 * max(good, bad):
        middle = 0.5 * (good + bad)
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return good
