"""A closed-form bound from the number of participations of a unit: valid for any noise, tight only for very little.

A grid of losses cannot represent steps with very little noise, and without amplification they cost T / z^2. But a unit
that is drawn with probability q in each of T steps, independently, takes part only N ~ Binomial(T, q) times. Let
K be such that P(N > K) <= b, and compare neighbours for the same draws. Steps without the unit are the same for both.
The others are Gaussian releases with means one sensitivity apart: together one Gaussian mechanism with

    mu = sqrt(N) / z <= sqrt(K) / z    if N <= K.

A probability is the mean over draws. With d the Gaussian mechanism's delta(epsilon), for every event S

    P(S) = sum_draws p(draws) P(S | draws) <= sum_{N <= K} p(draws) (e^epsilon Q(S | draws) + d) + P(N > K)
         <= e^epsilon Q(S) + d + b

and the same with P and Q exchanged. So all steps are (epsilon, d + b)-private. It holds for either adjacency, with
its own sensitivity: under zero-out a unit that is not drawn, or absent, adds nothing; under replace-one both records
are drawn at the same steps, because the draw depends on positions alone. Several kinds of steps share b, and
releases that every unit takes part in add to mu^2.
"""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np
from scipy import special

from clipwise.accounting import gaussian
from clipwise.accounting.composition import Composition
from clipwise.accounting.gaussian import Array

_POWERS = range(1, 21)  # b is the best of 10^-1 to 10^-20


def epsilon(total: Composition, delta: float) -> float:
    """An epsilon of a composition, with half of delta for P(N > K); inf if no unit is drawn at random."""
    if not total.drawn:
        return math.inf
    return gaussian.epsilon(delta / 2, _mu(total, delta / 2))


def delta(total: Composition, epsilon: float) -> float:
    """The least of d + b; 1 if no unit is drawn at random."""
    if not total.drawn:
        return 1.0

    def at(power: float) -> float:
        missed = math.pow(10.0, -power)
        return missed + gaussian.delta(epsilon, _mu(total, missed))

    best = min(_POWERS, key=at)
    return min(1.0, *(at(best + step / 20) for step in range(-20, 21)))


def profile(total: Composition, epsilons: Array) -> Array:
    """Upper bounds on delta at many epsilons, slightly coarser."""
    best = np.ones_like(epsilons)
    for missed in (10.0**-power for power in _POWERS if total.drawn):
        mu = _mu(total, missed)
        best = np.minimum(best, [missed + gaussian.delta(float(e), mu) for e in epsilons])
    return best


def most(steps: int, rate: float, missed: float) -> int:
    """The smallest K with P(Binomial(steps, rate) > K) <= missed, or slightly more: the tail is doubled."""
    return bisect_left(range(steps), True, key=lambda k: 2 * float(special.betainc(k + 1, steps - k, rate)) <= missed)


def _mu(total: Composition, missed: float) -> float:
    """sqrt(mu_sure^2 + sum_kinds K / z^2), rounded up."""
    share = missed / len(total.drawn)
    squares = [total.sure_mu**2]
    squares += [most(count, rate, share) * (1 / z) * (1 / z) for (rate, z), count in total.drawn]
    return math.sqrt(math.fsum(squares)) * (1 + 2.0**-50)
