"""Lower bounds on epsilon and mu from the numbers of right and wrong guesses.

All are one-sided confidence bounds: for any mechanism, a bound exceeds the true value with probability at most
`failure`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import special, stats

from clipwise.accounting import gaussian
from clipwise.accounting.gaussian import Array

# Epsilons at which a curve is compared with the guesses of one run.
_EPSILONS = np.concatenate([np.linspace(0.0, 4.0, 41), np.linspace(4.4, 16.0, 30)])


def at_least(successes: int, trials: int, failure: float) -> float:
    """Clopper-Pearson lower bound on a probability: P(X >= successes) equals `failure` there."""
    return float(stats.beta.ppf(failure, successes, trials - successes + 1)) if successes else 0.0


def at_most(successes: int, trials: int, failure: float) -> float:
    """Clopper-Pearson upper bound on a probability."""
    return 1 - at_least(trials - successes, trials, failure)


def epsilon_of_errors(false_positive: float, false_negative: float, delta: float) -> float:
    """The least epsilon >= 0 that allows these errors: 1 - delta - beta <= e^epsilon alpha, in both orders."""
    found = 0.0
    for alpha, beta in ((false_positive, false_negative), (false_negative, false_positive)):
        gap = 1 - delta - beta
        if gap > 0:
            found = max(found, math.log(gap / alpha) if alpha > 0 else math.inf)
    return found


def mu_of_accuracy(accuracy: float) -> float:
    """The least mu of a Gaussian mechanism that allows this accuracy, if both worlds are equally likely.

    TPR + TNR <= 2 Phi(mu / 2), attained by the test at the midpoint.
    """
    return max(0.0, 2 * float(special.ndtri(accuracy)))


def p_value_in_one_run(guesses: int, right: int, canaries: int, epsilon: float, delta: float) -> float:
    """An upper bound on the probability of this many right guesses against an (epsilon, delta)-private run.

    Each of m canaries is included independently with probability 1/2, and r of these m bits are guessed from the
    releases. With delta = 0, each guessed bit, given the releases and all earlier bits, is right with probability at
    most e^epsilon / (1 + e^epsilon), so W ~ Binomial(r, e^epsilon / (1 + e^epsilon)) stochastically dominates the
    number of right guesses. With delta > 0, each canary is also revealed with probability up to 2 delta, so W + F
    dominates the number, with E F <= 2 m delta. For any distribution of F,

        P(W + F >= v) <= P(W >= v) + E F max_i P(v - i <= W < v) / i.

    (Steinke, Nasr and Jagielski, "Privacy auditing with one (1) training run", 2023.)
    """
    if right <= 0 or math.isinf(epsilon):
        return 1.0
    p = float(special.expit(epsilon))
    tail = float(stats.binom.sf(right - 1, guesses, p))
    if delta == 0:
        return tail
    below = np.cumsum(stats.binom.pmf(np.arange(right - 1, -1, -1), guesses, p))  # P(v - i <= W < v), i = 1, 2, ...
    steepest = float(np.max(below / np.arange(1, right + 1)))
    return min(1.0, tail + 2 * canaries * delta * steepest)


def p_value_of_curve(guesses: int, right: int, canaries: int, delta_at: Callable[[float], float]) -> float:
    """The same for a mechanism that is (epsilon, delta_at(epsilon))-private at every epsilon: the least of all."""
    return min(p_value_in_one_run(guesses, right, canaries, float(e), delta_at(float(e))) for e in _EPSILONS)


def epsilon_in_one_run(guesses: int, right: int, canaries: int, delta: float, failure: float) -> float:
    """The largest epsilon that this many right guesses rule out."""
    return _largest(lambda e: p_value_in_one_run(guesses, right, canaries, e, delta) <= failure)


def mu_in_one_run(guesses: int, right: int, canaries: int, failure: float) -> float:
    """The largest mu that this many right guesses rule out, by all (epsilon, delta) of a Gaussian mechanism."""
    return _largest(lambda mu: p_value_of_curve(guesses, right, canaries, lambda e: gaussian.delta(e, mu)) <= failure)


def log_ratio(x: Array, shift: float, rate: float) -> Array:
    """log(1 - q + q exp(a x - a^2 / 2)): the log-likelihood ratio of (1 - q) N(0, 1) + q N(a, 1) against N(0, 1)."""
    if shift == 0:
        return np.zeros_like(x)
    # gaussian.loss is for a shift of 1 against noise z = 1 / |a|.
    z = 1 / abs(shift)
    return gaussian.loss(math.copysign(1.0, shift) * x * z, rate, z)


def _largest(is_ruled_out: Callable[[float], bool], limit: float = 50.0) -> float:
    """The end, from below, of the interval from 0 in which the predicate holds."""
    if not is_ruled_out(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while high < limit and is_ruled_out(high):
        low, high = high, 2 * high
    while high - low > 1e-3:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if is_ruled_out(middle) else (low, middle)
    return low
