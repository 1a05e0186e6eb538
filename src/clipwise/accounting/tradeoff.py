"""Trade-off functions (f-DP): how well any test can distinguish two neighbouring data sets.

f(alpha) is the least false-negative rate of a test with false-positive rate alpha (Dong, Roth and Su, "Gaussian
differential privacy", 2022). f(alpha) = 1 - alpha is a random guess, f = 0 is no privacy. Every `Tradeoff` is a lower
bound on the true curve.

Under Poisson sampling the two orders of the neighbours have different curves, f and its inverse. The curve that holds
for both is the convex hull of the lower of the two, the curve of delta(epsilon), the larger of both orders' deltas. So
every `Tradeoff` is symmetric in false positives and false negatives.

Every pair (epsilon, delta) is a line below the curve. `refined` chooses the epsilons at which to compute delta; any
choice gives a bound. `crossings` finds the corners of the maximum of the lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from scipy import special

from clipwise.accounting import gaussian, pld, truncation
from clipwise.accounting.composition import Composition, compose, with_few_kinds
from clipwise.accounting.gaussian import Array
from clipwise.errors import ConfigurationError
from clipwise.privacy import Entry
from clipwise.validation.arguments import number

# A larger loss counts as infinite: e^300 can still be squared.
LARGEST = 300.0
SMALLEST = 1e-6
# A crossing that would rise by less than this, and by less than this share of the detection rate, is not refined.
ABSOLUTE = 1e-5
RELATIVE = 5e-4
NOTICEABLE = 1e-13
MOST_ROUNDS = 16
MOST_POINTS = 6000


def refined(profile: Callable[[Array], Array]) -> tuple[Array, Array]:
    """Epsilons in rising order and their deltas, from a function that bounds delta from above at every epsilon.

    The bound is worst at the crossing of two lines. Where a line in between would raise it noticeably, that line is
    added.
    """
    epsilons = np.concatenate([[0.0], np.geomspace(SMALLEST, LARGEST, 128)])
    deltas = profile(epsilons)
    low, high = epsilons[:-1], epsilons[1:]
    delta_low, delta_high = deltas[:-1], deltas[1:]
    for _ in range(MOST_ROUNDS):
        if not len(low) or len(epsilons) > MOST_POINTS:
            break
        middle = 0.5 * (low + high)
        delta_middle = profile(middle)
        # The lines of low and high cross at alpha; the line of middle is higher there by this much.
        alpha = np.maximum(delta_low - delta_high, 0.0) / (np.expm1(high) - np.expm1(low))
        lifted = delta_low - delta_middle - (np.expm1(middle) - np.expm1(low)) * alpha
        detected = delta_low + np.exp(low) * alpha
        useful = lifted > np.maximum(np.minimum(ABSOLUTE, RELATIVE * detected), NOTICEABLE)
        low, middle, high = low[useful], middle[useful], high[useful]
        delta_low, delta_middle, delta_high = delta_low[useful], delta_middle[useful], delta_high[useful]
        epsilons, deltas = np.concatenate([epsilons, middle]), np.concatenate([deltas, delta_middle])
        low, high = np.concatenate([low, middle]), np.concatenate([middle, high])
        delta_low, delta_high = (np.concatenate([delta_low, delta_middle]), np.concatenate([delta_middle, delta_high]))
    order = np.argsort(epsilons)
    return epsilons[order], deltas[order]


def lower_hull(x: Array, y: Array) -> tuple[Array, Array]:
    """The corners of the lower convex hull of points, from the smallest x to the largest."""
    order = np.lexsort((y, x))
    corners: list[tuple[float, float]] = []
    for point in zip(x[order].tolist(), y[order].tolist(), strict=True):
        if corners and point[0] == corners[-1][0]:
            continue  # directly above the last one
        while len(corners) > 1 and not _turns_up(corners[-2], corners[-1], point):
            corners.pop()
        corners.append(point)
    found = np.array(corners, dtype=np.float64)
    return found[:, 0], found[:, 1]


def _turns_up(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Whether b lies below the line from a to c."""
    return (b[1] - a[1]) * (c[0] - b[0]) < (c[1] - b[1]) * (b[0] - a[0])


def crossings(steepness: Array, deltas: Array) -> tuple[Array, Array]:
    """Where neighbours among the lines beta = 1 - delta - (1 + x) alpha cross, by falling x = e^epsilon - 1.

    Lines that are nowhere the highest are left out: they are the points (x, delta) above their own lower hull.
    """
    x, d = lower_hull(steepness, deltas)
    x, d = x[::-1], d[::-1]
    alphas = np.maximum.accumulate(np.maximum(np.diff(d) / -np.diff(x), 0.0))
    betas = 1 - d[1:] - (1 + x[1:]) * alphas  # on the flatter line of the two, with less cancellation
    return alphas, betas


# The error of the corners is about this; curves are lowered by it.
ROUNDING = 4 * 2.0**-53
# Spacing of the tangents to a Gaussian's curve, in standard deviations of the test's threshold.
TANGENTS = 0.01
# Above this mu, even a false-positive rate of 1e-300 allows a negligible false-negative rate.
LARGEST_MU = 50.0


@dataclass(frozen=True, eq=False)
class Tradeoff:
    """A convex, falling, symmetric, piecewise linear trade-off function. Call it: `f(0.01)`.

    Build one by `of(history)`, `Tradeoff.gaussian(mu)`, `Tradeoff.from_profile(epsilons, deltas)` or
    `Tradeoff.identity()`; the corners are not checked.
    """

    alphas: Array  # false-positive rates of the corners, rising from 0. Beyond the last, f is 0.
    betas: Array  # f at the corners, falling to 0

    @classmethod
    def identity(cls) -> Tradeoff:
        """Perfect privacy: 1 - alpha, a random guess."""
        return cls(np.array([0.0, 1.0]), np.array([1.0, 0.0]))

    @classmethod
    def nothing(cls) -> Tradeoff:
        """No privacy at all: 0."""
        return cls(np.zeros(1), np.zeros(1))

    @classmethod
    def gaussian(cls, mu: float) -> Tradeoff:
        """G_mu, the curve of N(0, 1) against N(mu, 1): Phi(Phi^-1(1 - alpha) - mu).

        Built from its tangents, so from below. A test at threshold t touches the tangent of epsilon = mu t - mu^2 / 2.
        """
        if mu == math.inf:
            return cls.nothing()
        mu = number("mu", mu, least=0)
        if mu == 0 or mu > LARGEST_MU:
            return cls.nothing() if mu else cls.identity()
        thresholds = np.arange(max(mu / 2, mu - gaussian.TAIL), mu + gaussian.TAIL, TANGENTS)
        epsilons = mu * (thresholds - mu / 2)
        epsilons = np.append(0.0, epsilons[(epsilons > 0) & (epsilons < LARGEST)])
        return cls.from_profile(epsilons, [gaussian.delta(float(e), mu) for e in epsilons])

    @classmethod
    def from_profile(cls, epsilons: Any, deltas: Any) -> Tradeoff:
        """The curve of a mechanism that is (epsilon, delta)-private, in both orders, for each given pair.

        f(alpha) = max over the pairs of 0, 1 - delta - e^epsilon alpha and e^-epsilon (1 - delta - alpha).
        """
        e, d = _checked_profile(epsilons, deltas)
        # A delta that holds at one epsilon holds at a larger one.
        d = np.minimum(np.minimum.accumulate(d) + ROUNDING, 1.0)
        alphas, betas = crossings(np.expm1(e), d)
        # At alpha = 0 the line of the least delta is the highest. On the diagonal beta = (1 - delta) / (1 + e^epsilon).
        start, middle = 1 - float(np.min(d)), float(np.max((1 - d) / (1 + np.exp(e))))
        steep = (alphas < middle) & (betas > middle)
        return cls._mirrored(
            np.concatenate([[0.0], alphas[steep], [middle]]), np.concatenate([[start], betas[steep], [middle]])
        )

    @classmethod
    def _mirrored(cls, alphas: Array, betas: Array) -> Tradeoff:
        """The symmetric curve with its corners above the diagonal among these points."""
        points = np.concatenate([alphas, betas]), np.concatenate([betas, alphas])
        x, y = lower_hull(*points)
        left = x < y
        on = x[x == y][:1]
        return cls(np.concatenate([x[left], on, y[left][::-1]]), np.concatenate([y[left], on, x[left][::-1]]))

    @overload
    def __call__(self, alpha: float) -> float: ...
    @overload
    def __call__(self, alpha: Array) -> Array: ...
    def __call__(self, alpha: float | Array) -> float | Array:
        """A lower bound on the false-negative rate at false-positive rate alpha."""
        at = np.asarray(alpha, dtype=np.float64)
        if not bool(np.all((at >= 0) & (at <= 1))):
            raise ConfigurationError("alpha is not possible: it must be a false-positive rate, from 0 to 1.")
        found = np.minimum(np.interp(at, self.alphas, self.betas, right=0.0), 1 - at)
        return float(found) if at.ndim == 0 else found

    def delta(self, epsilon: float) -> float:
        """The smallest delta at `epsilon` >= 0: max 1 - beta - e^epsilon alpha."""
        e = number("epsilon", epsilon, least=0)
        with np.errstate(over="ignore", invalid="ignore"):
            gaps = 1 - self.betas - np.where(self.alphas > 0, np.exp(np.float64(e)) * self.alphas, 0.0)
        return min(1.0, max(0.0, float(gaps.max())))

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon >= 0 at `delta`: log max (1 - beta - delta) / alpha."""
        gaps = 1 - self.betas - number("delta", delta, above=0, below=1)
        positive = self.alphas > 0
        if np.any(gaps[~positive] > 0):
            return math.inf
        return math.log(float(np.max(gaps[positive] / self.alphas[positive], initial=1.0))) * (1 + ROUNDING)

    def mu(self, slack: float = 1e-5) -> float:
        """The smallest mu for which f >= G_mu - slack everywhere; inf if there is none.

        With slack = 0 this is Gaussian differential privacy, which few mechanisms other than the Gaussian have: if a
        test can succeed without false positives, however rarely, the curve is not above any G_mu. f is linear
        between corners and G_mu is convex, so only the corners matter:
        mu = max Phi^-1(1 - alpha) - Phi^-1(beta + slack).
        """
        allowed = number("slack", slack, least=0, below=1)
        betas = self.betas + allowed
        binding = (betas < 1) & (self.alphas < 1)
        needed = -special.ndtri(self.alphas[binding]) - special.ndtri(betas[binding])
        return max(0.0, float(np.max(needed, initial=0.0)))

    # Figures for an attacker that sees every release, knows both data sets, and tests whether the one with the unit was
    # used ("in") or its neighbour ("out"). A test has a false-positive rate alpha ("in" for "out") and a detection rate
    # 1 - beta, with f(alpha) <= beta. All figures are upper bounds over all attackers. Each is linear along a straight
    # piece of f, so only the corners matter.

    def advantage(self) -> float:
        """The largest detection rate minus false-positive rate of any test: max 1 - alpha - f(alpha)."""
        return _rounded_up(float(np.max(1 - self.alphas - self.betas)))

    def power(self, fpr: float) -> float:
        """The largest detection (true-positive) rate of a test with this false-positive rate: 1 - f(fpr)."""
        return 1 - self(number("fpr", fpr, least=0, most=1))

    def accuracy(self, prior: float = 0.5) -> float:
        """The largest probability of a right guess, 1 - min over f of (1 - prior) alpha + prior beta.

        `prior` is the probability of "in" before any release.
        """
        p = number("prior", prior, least=0, most=1)
        return _rounded_up(1 - float(np.min((1 - p) * self.alphas + p * self.betas)))

    def precision(self, fpr: float, prior: float = 0.5) -> float:
        """The largest posterior probability of "in" after a positive test, by Bayes' rule.

        It bounds every test with a false-positive rate of *at least* fpr, since power(fpr) / fpr falls with fpr.
        """
        rate, p = (number(name, x, least=0, most=1) for name, x in (("fpr", fpr), ("prior", prior)))
        caught, wronged = p * self.power(rate), (1 - p) * rate
        if wronged == 0 and caught > 0:
            return 1.0
        return _rounded_up(caught / (caught + wronged) if caught > 0 else p)

    def __repr__(self) -> str:
        return f"Tradeoff(advantage={self.advantage():.4g}, power at fpr 0.01={self.power(0.01):.4g})"


def of(history: Sequence[Entry]) -> Tradeoff:
    """The trade-off function of a whole history, for both orders, by the PLD accountant: a lower bound, within 1e-3.

    Perfect privacy for an empty history; none if a release had no noise.
    """
    total = compose(history)
    if math.isinf(total.unamplified_mu):
        return Tradeoff.nothing()
    if not total.steps and total.excess == 0 and total.failure == 0:
        return Tradeoff.gaussian(total.mu)
    total = with_few_kinds(total, pld.MOST_KINDS)
    return Tradeoff.from_profile(*refined(lambda epsilons: _profile(total, epsilons)))


def profile(history: Sequence[Entry], epsilons: Array) -> Array:
    """Upper bounds on delta of a whole history at many epsilons >= 0, by the PLD accountant."""
    return _profile(compose(history), epsilons)


def _profile(total: Composition, epsilons: Array) -> Array:
    rare = [truncation.added_delta(float(e), total.excess, total.failure) for e in epsilons]
    return np.minimum(pld.profile(total, epsilons) + rare, 1.0)


def _checked_profile(epsilons: Any, deltas: Any) -> tuple[Array, Array]:
    e, d = np.atleast_1d(np.asarray(epsilons, np.float64)), np.atleast_1d(np.asarray(deltas, np.float64))
    if e.ndim != 1 or e.shape != d.shape or not len(e):
        raise ConfigurationError("epsilons and deltas must be sequences of the same length.")
    for name, values, most in (("epsilons", e, LARGEST), ("deltas", d, 1.0)):
        if not bool(np.all((values >= 0) & (values <= most))):
            raise ConfigurationError(f"{name}: each must lie in [0, {most:g}].")
    order = np.argsort(e, kind="stable")
    return e[order], d[order]


def _rounded_up(probability: float) -> float:
    """A probability rounded up by more than its rounding error."""
    return min(1.0, max(0.0, probability) * (1 + 2.0**-50))
