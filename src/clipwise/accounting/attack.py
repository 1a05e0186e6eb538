"""What a trade-off function means for an attacker who tells two neighbouring data sets apart.

The attacker sees everything that was released, knows both data sets, and asks whether the one with the unit
in question was used ("in") or its neighbour ("out"). A test has a false-positive rate alpha (says "in" for "out")
and a detection rate 1 - beta; f(alpha) <= beta for every test. All figures here are the attacker's best, from
above. They are minima over the corners of f, since each is linear along a straight piece.
"""

from __future__ import annotations

import math

import numpy as np

from clipwise.accounting.gaussian import Array


def advantage(alphas: Array, betas: Array) -> float:
    """The largest detection rate minus false-positive rate: max 1 - alpha - beta."""
    return _rate(float(np.max(1 - alphas - betas)))


def accuracy(alphas: Array, betas: Array, prior: float) -> float:
    """The largest probability of a right guess: 1 - min over f of (1 - prior) alpha + prior beta."""
    return _rate(1 - float(np.min((1 - prior) * alphas + prior * betas)))


def precision(detection: float, fpr: float, prior: float) -> float:
    """The posterior probability of "in" after a test that says so: Bayes' rule."""
    caught, wronged = prior * detection, (1 - prior) * fpr
    return 1.0 if wronged == 0 and caught > 0 else _rate(caught / (caught + wronged) if caught > 0 else prior)


def odds_factor(alphas: Array, betas: Array, tail: float) -> float:
    """The least factor by which one outcome raises the odds of "in", but for outcomes of probability `tail`.

    With p = P(loss > t) and any s < t, delta(s) >= p (1 - e^(s - t)), so p <= tail if
    e^-t <= e^-s (1 - delta(s) / tail). On one corner of f, delta(s) = 1 - beta - e^s alpha, and the right side is
    (e^-s (tail - 1 + beta) + alpha) / tail: linear in e^-s, so the best s is the steepness of a straight piece.
    """
    if tail <= 1 - float(betas[0]):
        return math.inf
    run, drop = np.diff(alphas), -np.diff(betas)
    straight = drop > 0
    flatness = run[straight] / drop[straight]  # e^-s
    room = tail - 1 + betas[:-1][straight]
    least = np.max((flatness * room + alphas[:-1][straight]) / tail, initial=0.0)
    return math.inf if least <= 0 else max(1.0, 1 / float(least))


def posterior(factor: float, prior: float) -> float:
    """The probability whose odds are `factor` times those of the prior."""
    return 1.0 if math.isinf(factor) else _rate(prior * factor / (1 - prior + prior * factor))


def _rate(value: float) -> float:
    """A probability, rounded up by more than its own rounding."""
    return min(1.0, max(0.0, value) * (1 + 2.0**-50))
