"""Privacy losses on a grid: discrete pairs of distributions that dominate the true ones.

A pair (P, Q) of output distributions enters composition only through the distribution of the loss
l = log(P / Q) under P. It is replaced by one on a grid with a curve delta(epsilon) on or above the true one
everywhere, and a composition of dominating pairs dominates the composition (convolve.py). Rounding goes in the same
direction. A curve is linear in the masses, with weights of at least 0, so every mass is rounded up by its possible
floating point error; the masses then sum to slightly over 1.

The pair on the grid connects the dots of the true curve: its own curve passes through the given deltas and is
linear in e^epsilon between them. A true curve is convex in e^epsilon, so it lies below (Doroshenko et al., "Connect
the Dots", 2022). This holds for any grid, so a coarse grid costs tightness and never validity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import signal

from clipwise.accounting.gaussian import Array

UNIT_ROUNDOFF = 2.0**-53
# 7 n u for the longest grids, n = 2^21.
_ROUNDING = 2.0**-29


@dataclass(frozen=True, eq=False)
class Losses:
    """The distribution of a privacy loss under P."""

    interval: float  # the spacing h of the grid, a power of two: every multiple of it is exact
    first: int  # the lowest loss, in units of h
    masses: Array  # the probabilities of the losses first h, (first + 1) h, ...
    lost: float  # the probability of an infinite loss

    @property
    def rounding(self) -> float:
        """The relative error of a sum over all masses, which are at least 0, in any order."""
        return 4 * UNIT_ROUNDOFF * (len(self.masses) + 8)

    @cached_property
    def _sums(self) -> tuple[Array, Array]:
        """U_j = lost + sum_{i >= j} m_i and W_j = sum_{i >= j} m_i e^(l_j - l_i), for every j and one beyond.

        With l_j the first loss above epsilon, delta(epsilon) = U_j - e^(epsilon - l_j) W_j.
        """
        downwards = self.masses[::-1]
        upper = self.lost + np.cumsum(downwards)
        weighted = signal.lfilter([1.0], [1.0, -math.exp(-self.interval)], downwards)
        return np.append(upper[::-1], self.lost), np.append(weighted[::-1], 0.0)

    def delta(self, epsilon: float) -> float:
        """delta(epsilon) = lost + sum_l m(l) max(0, 1 - e^(epsilon - l)), rounded up."""
        size = len(self.masses)
        above = max(0, math.floor(min(epsilon / self.interval - self.first, size)) + 1)
        losses = grid(self.first + above, self.first + size - 1, self.interval)
        return (self.lost + float(self.masses[above:] @ -np.expm1(epsilon - losses))) * (1 + self.rounding)

    def deltas(self, epsilons: Array) -> Array:
        """delta at many epsilons of either sign, rounded up: the error of U - W is at most 4 n u U, and
        U(e) <= delta(e - 1) / (1 - 1/e)."""
        return np.maximum(self._deltas(epsilons), 0.0) + _ROUNDING * np.maximum(self._deltas(epsilons - 1), 0.0)

    def _deltas(self, epsilons: Array) -> Array:
        upper, weighted = self._sums
        positions = np.floor(epsilons / self.interval) + 1 - self.first
        index = np.clip(positions, 0, len(self.masses)).astype(np.int64)
        share = np.exp(np.minimum(epsilons - self.interval * (self.first + index), 0.0))
        deltas: Array = upper[index] - share * weighted[index]
        return deltas

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon >= 0 with delta(epsilon) <= delta, rounded up."""
        if not self.lost * (1 + 2 * self.rounding) <= delta:
            return math.inf
        # The losses >= 0, the largest first.
        upper, weighted = (sums[max(0, -self.first) : -1][::-1] for sums in self._sums)
        aim = delta / (1 + 4 * self.rounding)
        beyond = np.flatnonzero(upper - weighted > aim)
        j = max(0, int(beyond[0]) - 1) if len(beyond) else len(upper) - 1
        loss = self.interval * (self.first + len(self.masses) - 1 - j)
        share = max(upper[j] - aim, 0.0) / weighted[j] if weighted[j] > 0 else 1.0
        found = max(0.0, loss + (math.log(share) if 0 < share < 1 else 0.0))
        # U - W has lost digits: move up until `delta`, which has not, agrees.
        step = max(1e-10 * found, 1e-9 * self.interval)
        while self.delta(found) > delta:
            found, step = found + step, 2 * step
        return found


def grid(first: int, last: int, interval: float) -> Array:
    """The losses from first to last, in units of the interval."""
    return interval * np.arange(first, last + 1, dtype=np.float64)


def connect_dots(deltas: Array, interval: float) -> tuple[Array, float]:
    """Masses of the pair with a curve through `deltas` that is linear in e^epsilon between them, rounded up.

    With drops g_i = delta_i - delta_{i+1} the mass at point i is (e^h g_{i-1} - g_i) / (e^h - 1). The first point
    gets no mass; above the last the curve stays at its delta, which is the lost mass.

    Returns:
        The masses of all points but the first, and how much rounding up has added to them.
    """
    # A delta that rounding raised above its predecessor is lowered.
    drops = -np.diff(np.minimum.accumulate(deltas))
    after = np.append(drops[1:], 0.0)
    raised = math.exp(interval) * drops
    exact = (raised - after) / math.expm1(interval)
    # Six roundings of u each: the drops, the product, the difference, the quotient, and e^h twice.
    masses = np.maximum(exact, 0.0) + 8 * UNIT_ROUNDOFF * (raised + after) / math.expm1(interval)
    return masses, float((masses - exact).sum())


def both_orders(deltas: Array, deltas_back: Array, interval: float) -> tuple[Losses, Losses]:
    """The pairs (P, Q) and (Q, P), from their curves at 0, h, 2h, ..., which may have different lengths.

    A mass m at loss l of one is a mass m e^-l at loss -l of the other. The remaining mass lies at loss 0. Both
    curves begin with the total variation distance. The mass at 0 compensates for the rounding up of the others:
    below epsilon = 0 a curve is the total of P, minus e^epsilon times the total of Q, plus e^epsilon times the
    other curve, and one of the first two may have been raised by more than the other.
    """
    deltas_back = np.append(deltas[:1], deltas_back[1:])
    masses, added = connect_dots(deltas, interval)
    back, added_back = connect_dots(deltas_back, interval)
    first, last = -len(back), len(masses)
    mirrored = (masses * np.exp(-grid(1, last, interval)))[::-1] * (1 + 8 * UNIT_ROUNDOFF)
    back_mirrored = (back * np.exp(-grid(1, -first, interval)))[::-1] * (1 + 8 * UNIT_ROUNDOFF)
    lost, lost_back = float(deltas[-1]), float(deltas_back[-1])
    at_zero = max(0.0, 1 - lost - float(masses.sum() + back_mirrored.sum()))
    at_zero += 2 * (added + added_back) + 128 * UNIT_ROUNDOFF
    return (
        Losses(interval, first, np.concatenate([back_mirrored, [at_zero], masses]), lost),
        Losses(interval, -last, np.concatenate([mirrored, [at_zero], back]), lost_back),
    )
