"""Trade-off functions (f-DP): how well any test can distinguish two neighbouring data sets.

f(alpha) is the least false-negative rate of a test with false-positive rate alpha (Dong, Roth and Su, "Gaussian
differential privacy", 2022). f(alpha) = 1 - alpha is a random guess, f = 0 is no privacy. Every `Tradeoff` is a lower
bound on the true curve.

A guarantee covers both orders of the neighbours. Under Poisson sampling the two orders have different curves,
f for "the unit was added" and its inverse for "the unit was removed". The curve that holds for both is the largest
trade-off function below both, the convex hull of the lower of the two; it is the curve of delta(epsilon), the
larger of both orders' deltas. `Tradeoff.symmetric` computes it, and `of(history)` returns it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from scipy import special

from clipwise.accounting import gaussian, pld, schedule, tensor_product, truncation
from clipwise.accounting.composition import Composition, compose
from clipwise.accounting.from_arguments import count as checked_count
from clipwise.accounting.gaussian import Array
from clipwise.accounting.tradeoff_lines import LARGEST, crossings, lower_hull, refined
from clipwise.errors import ConfigurationError
from clipwise.privacy import Entry
from clipwise.validation.arguments import number

# The error of the corners is about this; curves are lowered by it.
ROUNDING = 4 * 2.0**-53
# Spacing of the tangents to a Gaussian's curve, in standard deviations of the test's threshold.
TANGENTS = 0.01
# Above this mu, even a false-positive rate of 1e-300 allows a negligible false-negative rate.
LARGEST_MU = 50.0
# The losses of more releases are not added up on a grid.
MOST_RELEASES = 10**8


@dataclass(frozen=True, eq=False)
class Tradeoff:
    """A convex, falling, piecewise linear trade-off function. Call it: `f(0.01)`.

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

    @property
    def is_symmetric(self) -> bool:
        """Whether the curve is the same for both orders of the neighbours."""
        return np.array_equal(self.alphas, self.betas[::-1])

    def inverse(self) -> Tradeoff:
        """The curve of the other order: false positives and false negatives exchanged."""
        return Tradeoff(self.betas[::-1], self.alphas[::-1])

    def symmetric(self) -> Tradeoff:
        """The largest trade-off function that holds for both orders: the convex hull of f and its inverse."""
        return self if self.is_symmetric else Tradeoff._mirrored(self.alphas, self.betas)

    def diluted(self, rate: float) -> Tradeoff:
        """rate f + (1 - rate) Id: the unit is included independently with probability `rate`, else adds nothing.

        This is one order of Poisson sampling. Compose such steps first, then make the result `symmetric`.
        """
        p = _probability("rate", rate)
        if p == 0:
            return Tradeoff.identity()
        alphas = self.alphas if self.alphas[-1] == 1 else np.append(self.alphas, 1.0)
        betas = self.betas if self.alphas[-1] == 1 else np.append(self.betas, 0.0)
        return _chain(alphas, (p * betas + (1 - p) * (1 - alphas)) * (1 - ROUNDING))

    def subsample(self, rate: float) -> Tradeoff:
        """C_p(f), p = rate: the mechanism on a random subset, where another unit replaces one that is not drawn.

        The convex hull of p f + (1 - p) Id and its inverse. For fixed-size batches under replace-one; one such
        step is also the guarantee of one Poisson step, but several are not (see `diluted`).
        """
        return self.symmetric().diluted(rate).symmetric()

    def tensor(self, *others: Tradeoff) -> Tradeoff:
        """The composition of these releases on the same data, from below."""
        return _product([(self, 1), *((other, 1) for other in others)])

    def repeated(self, count: int) -> Tradeoff:
        """The tensor product of `count` copies."""
        return _product([(self, checked_count("count", count))])

    def delta(self, epsilon: float) -> float:
        """The smallest delta at `epsilon` >= 0, for both orders: max 1 - beta - e^epsilon alpha."""
        e = number("epsilon", epsilon, least=0)
        with np.errstate(over="ignore", invalid="ignore"):
            pairs = ((self.alphas, self.betas), (self.betas, self.alphas))
            gaps = [1 - b - np.where(a > 0, np.exp(np.float64(e)) * a, 0.0) for a, b in pairs]
        return min(1.0, max(0.0, *(float(gap.max()) for gap in gaps)))

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon >= 0 at `delta`, for both orders: log max (1 - beta - delta) / alpha."""
        d = number("delta", delta, above=0, below=1)
        steepest = 1.0
        for a, b in ((self.alphas, self.betas), (self.betas, self.alphas)):
            gap = 1 - b - d
            if np.any((a == 0) & (gap > 0)):
                return math.inf
            steepest = max(steepest, float(np.max(gap[a > 0] / a[a > 0], initial=1.0)))
        return math.log(steepest) * (1 + ROUNDING)

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
        return 1 - self(_probability("fpr", fpr))

    def accuracy(self, prior: float = 0.5) -> float:
        """The largest probability of a right guess, 1 - min over f of (1 - prior) alpha + prior beta.

        `prior` is the probability of "in" before any release.
        """
        p = _probability("prior", prior)
        return _rounded_up(1 - float(np.min((1 - p) * self.alphas + p * self.betas)))

    def precision(self, fpr: float, prior: float = 0.5) -> float:
        """The largest posterior probability of "in" after a positive test, by Bayes' rule.

        It bounds every test with a false-positive rate of *at least* fpr, since power(fpr) / fpr falls with fpr.
        """
        rate, p = _probability("fpr", fpr), _probability("prior", prior)
        caught, wronged = p * self.power(rate), (1 - p) * rate
        if wronged == 0 and caught > 0:
            return 1.0
        return _rounded_up(caught / (caught + wronged) if caught > 0 else p)

    def odds_factor(self, tail: float) -> float:
        """The largest factor by which one outcome raises the odds of "in" (or of "out"), except for rare outcomes.

        An outcome with a larger factor has probability at most `tail`, in both worlds. A bound without exceptions is
        not possible, since Gaussian noise can, very rarely, reveal everything. inf if the curve gives no bound for so
        small a tail.
        """
        t = number("tail", tail, above=0, below=1)
        back = self.inverse()
        return max(_odds_factor(self.alphas, self.betas, t), _odds_factor(back.alphas, back.betas, t))

    def posterior(self, prior: float, tail: float) -> float:
        """The largest probability of "in" after seeing one outcome, except for rare outcomes.

        Its odds are prior / (1 - prior) times `odds_factor(tail)`; a larger one has probability at most `tail`.
        """
        p, factor = _probability("prior", prior), self.odds_factor(tail)
        return 1.0 if math.isinf(factor) else _rounded_up(p * factor / (1 - p + p * factor))

    def __repr__(self) -> str:
        return f"Tradeoff(advantage={self.advantage():.4g}, power at fpr 0.01={self.power(0.01):.4g})"


def _odds_factor(alphas: Array, betas: Array, tail: float) -> float:
    """The least factor by which one outcome raises the odds of "in", except for outcomes of probability `tail`.

    With p = P(loss > t) and any s < t, delta(s) >= p (1 - e^(s - t)), so p <= tail if
    e^-t <= e^-s (1 - delta(s) / tail). On one corner of f, delta(s) = 1 - beta - e^s alpha, and the right side is
    (e^-s (tail - 1 + beta) + alpha) / tail: linear in e^-s, so the best s is the slope of a straight piece.
    """
    if tail <= 1 - float(betas[0]):
        return math.inf
    run, drop = np.diff(alphas), -np.diff(betas)
    straight = drop > 0
    flatness = run[straight] / drop[straight]  # e^-s
    margin = tail - 1 + betas[:-1][straight]
    least = np.max((flatness * margin + alphas[:-1][straight]) / tail, initial=0.0)
    return math.inf if least <= 0 else max(1.0, 1 / float(least))


def of(history: Sequence[Entry]) -> Tradeoff:
    """The trade-off function of a whole history, for both orders, by the PLD accountant.

    It is a lower bound, within 1e-3. Perfect privacy for an empty history; none if a release had no noise.
    """
    total = compose(history)
    if math.isinf(total.unamplified_mu):
        return Tradeoff.nothing()
    if not total.steps and total.excess == 0:
        return Tradeoff.gaussian(total.mu)
    total = schedule.with_few_kinds(total, pld.MOST_KINDS)
    return Tradeoff.from_profile(*refined(lambda epsilons: _profile(total, epsilons)))


def profile(history: Sequence[Entry], epsilons: Array) -> Array:
    """Upper bounds on delta of a whole history at many epsilons >= 0, by the PLD accountant."""
    return _profile(compose(history), epsilons)


def _profile(total: Composition, epsilons: Array) -> Array:
    of_cuts = [truncation.added_delta(float(e), total.excess) for e in epsilons] if total.excess else 0.0
    return np.minimum(pld.profile(total, epsilons) + of_cuts, 1.0)


def _product(factors: Sequence[tuple[Tradeoff, int]]) -> Tradeoff:
    """The tensor product, from the privacy losses of the curves' straight pieces."""
    counted = [(curve, count) for curve, count in factors if count > 0 and not _is_identity(curve)]
    if not counted:
        return Tradeoff.identity()
    if len(counted) == 1 and counted[0][1] == 1:
        return counted[0][0]
    if any(curve.betas[0] <= ROUNDING for curve, _ in counted):
        return Tradeoff.nothing()
    if sum(count for _, count in counted) > MOST_RELEASES:
        raise ConfigurationError(
            f"count is not possible: at most {MOST_RELEASES:g} curves can be composed. For more steps of a run use "
            "accounting.tradeoff(...), which takes any number."
        )
    deltas_at = tensor_product.product([(curve.alphas, curve.betas, count) for curve, count in counted])
    if all(curve.is_symmetric for curve, _ in counted):
        return Tradeoff.from_profile(*refined(lambda e: np.clip(deltas_at(e), 0.0, 1.0)))
    epsilons, deltas = refined(lambda e: np.clip(np.maximum(deltas_at(e), -np.expm1(e)), 0.0, 1.0), both_signs=True)
    return _of_one_order(epsilons, deltas)


def _of_one_order(epsilons: Array, deltas: Array) -> Tradeoff:
    """The curve max(0, 1 - delta - e^epsilon alpha) of one order, from epsilons of both signs."""
    d = np.minimum(deltas + ROUNDING, 1.0)
    alphas, betas = crossings(np.expm1(epsilons), d)
    end = min(1.0, float(np.max((1 - d) * np.exp(-epsilons))))  # where the last line reaches 0
    inside = (betas > 0) & (alphas < end)
    return _chain(
        np.concatenate([[0.0], alphas[inside], [end]]), np.concatenate([[1 - float(np.min(d))], betas[inside], [0.0]])
    )


def _chain(alphas: Array, betas: Array) -> Tradeoff:
    """The curve through these points, up to the first with beta <= 0."""
    x, y = lower_hull(alphas, np.maximum(betas, 0.0))
    stop = int(np.argmax(y <= 0)) + 1
    return Tradeoff(x[:stop], y[:stop])


def _is_identity(curve: Tradeoff) -> bool:
    return len(curve.alphas) == 2 and curve.betas[0] == 1 and curve.alphas[1] == 1


def _checked_profile(epsilons: Any, deltas: Any) -> tuple[Array, Array]:
    """Epsilons >= 0 and as many deltas in [0, 1], sorted by epsilon."""
    e, d = np.atleast_1d(np.asarray(epsilons, np.float64)), np.atleast_1d(np.asarray(deltas, np.float64))
    if e.ndim != 1 or e.shape != d.shape or not len(e):
        raise ConfigurationError("epsilons and deltas must be sequences of the same length.")
    for name, values, most in (("epsilons", e, LARGEST), ("deltas", d, 1.0)):
        if not bool(np.all((values >= 0) & (values <= most))):
            raise ConfigurationError(f"{name}: each must lie in [0, {most:g}].")
    order = np.argsort(e, kind="stable")
    return e[order], d[order]


def _probability(name: str, value: Any) -> float:
    return number(name, value, least=0, most=1)


def _rounded_up(probability: float) -> float:
    """A probability rounded up by more than its rounding error."""
    return min(1.0, max(0.0, probability) * (1 + 2.0**-50))
