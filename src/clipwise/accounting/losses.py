"""Privacy losses on a grid: the discrete pairs that stand in for true ones, their sums, and what they cost.

A pair (P, Q) of output distributions enters composition only through the distribution of the loss
l = log(P / Q) under P. `connect_dots` replaces it by one on a grid whose curve delta(epsilon) lies on or above
the true one everywhere (Doroshenko et al., "Connect the Dots", 2022). That holds for any grid, so a coarse one
costs tightness and never validity; and a composition of dominating pairs dominates the composition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import fft, signal

from clipwise.accounting.gaussian import Array

# Mass that a sum may leave out at either end; what is left out above is counted as lost.
TAIL_MASS = 1e-15


@dataclass(frozen=True)
class Losses:
    """The distribution of a privacy loss under P.

    Args:
        interval: the spacing h of the grid.
        first: the lowest loss, in units of h.
        masses: the probabilities of the losses first h, (first + 1) h, ...
        lost: the probability of an infinite loss.
    """

    interval: float
    first: int
    masses: Array
    lost: float

    def delta(self, epsilon: float) -> float:
        """delta(epsilon) = lost + sum_l m(l) max(0, 1 - e^(epsilon - l))."""
        above = max(0, math.floor(epsilon / self.interval) + 1 - self.first)
        losses = grid(self.first + above, self.first + len(self.masses) - 1, self.interval)
        return self.lost + float(self.masses[above:] @ -np.expm1(epsilon - losses))

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon >= 0 with delta(epsilon) <= delta.

        On the grid, with U_j = lost + sum_{i >= j} m_i and W_j = sum_{i >= j} m_i e^(l_j - l_i),
        delta(l_j) = U_j - W_j, and between l_{j-1} and l_j it is U_j - e^(epsilon - l_j) W_j.
        """
        if self.lost > delta:
            return math.inf
        if self.delta(0.0) <= delta:
            return 0.0
        masses = self.masses[max(0, -self.first) :][::-1]  # of losses >= 0, the largest first
        upper = self.lost + np.cumsum(masses)
        weighted = signal.lfilter([1.0], [1.0, -math.exp(-self.interval)], masses)
        beyond = np.flatnonzero(upper - weighted > delta)
        j = int(beyond[0]) - 1 if len(beyond) else len(masses) - 1
        loss = self.interval * (self.first + len(self.masses) - 1 - j)
        return max(0.0, loss + min(0.0, math.log((upper[j] - delta) / weighted[j])))


def grid(first: int, last: int, interval: float) -> Array:
    """The losses from first to last, in units of the interval."""
    return interval * np.arange(first, last + 1, dtype=np.float64)


def connect_dots(deltas: Array, interval: float) -> tuple[Array, float]:
    """Masses and lost mass of the pair whose curve passes through `deltas` and is linear in e^epsilon between.

    With drops g_i = delta_i - delta_{i+1} the mass at point i is (e^h g_{i-1} - g_i) / (e^h - 1). Below the
    grid the curve is joined to delta = 1 at epsilon = -inf, above it stays at the last delta.
    """
    deltas = np.minimum.accumulate(deltas)
    drops = -np.diff(deltas)
    before = np.concatenate([[(1 - deltas[0]) * -math.expm1(-interval)], drops])
    after = np.concatenate([drops, [0.0]])
    masses = (math.exp(interval) * before - after) / math.expm1(interval)
    return np.maximum(masses, 0.0), float(deltas[-1])


def add_up(parts: Sequence[tuple[Losses, int]]) -> Losses:
    """The distribution of the sum of independent losses, each taken a number of times.

    Masses are convolved by FFT on a window that leaves out at most TAIL_MASS at either end. What lies above
    the window is counted as lost (and what wraps around is counted once more, never missed).
    """
    parts = [(_trimmed(part, TAIL_MASS / count), count) for part, count in parts]
    low, high = _window(parts)
    size = max(high - low + 1, max(len(part.masses) for part, _ in parts))
    size = fft.next_fast_len(size, real=True)
    spectrum = np.ones(size // 2 + 1, dtype=np.complex128)
    for part, count in parts:
        spectrum *= fft.rfft(part.masses, size) ** count
    masses = np.roll(fft.irfft(spectrum, size), -low)[: high - low + 1]
    kept = sum(count * math.log1p(-part.lost) for part, count in parts)
    first = sum(count * part.first for part, count in parts) + low
    return Losses(parts[0][0].interval, first, masses, TAIL_MASS - math.expm1(kept))


def _trimmed(part: Losses, tail: float) -> Losses:
    """Without the ends that hold less than `tail`: the upper is lost, the lower is moved up."""
    size = len(part.masses)
    start = min(int(np.searchsorted(np.cumsum(part.masses), tail)), size - 1)
    stop = max(size - int(np.searchsorted(np.cumsum(part.masses[::-1]), tail)), start + 1)
    masses = part.masses[start:stop].copy()
    masses[0] += part.masses[:start].sum()
    return Losses(part.interval, part.first + start, masses, part.lost + float(part.masses[stop:].sum()))


def _window(parts: Sequence[tuple[Losses, int]]) -> tuple[int, int]:
    """Where the sum of the positions on the grids lies, but for TAIL_MASS at either end.

    Chernoff: P(sum >= x) <= e^(K(t) - t x) with K the sum of the logarithms of the moment generating functions,
    so x = (K(t) - log TAIL_MASS) / t is high enough for any t > 0, and low enough for any t < 0.
    """
    low, high = 0, sum(count * (len(part.masses) - 1) for part, count in parts)
    with np.errstate(divide="ignore"):
        tables = [(np.log(part.masses), np.arange(len(part.masses)), count) for part, count in parts]
    deviation = math.sqrt(sum(count * _variance(part) for part, count in parts))
    longest = max(len(part.masses) for part, _ in parts)
    # From what suits a sum as heavy-tailed as its longest term to twice the best order for a Gaussian sum.
    largest = 2 * math.sqrt(-2 * math.log(TAIL_MASS)) / max(deviation, 1e-3)
    smallest = min(1 / longest, largest / 8)
    for order in np.geomspace(smallest, largest, 1 + math.ceil(math.log(largest / smallest, 3))):
        for t in (order, -order):
            K = sum(count * _log_sum_exp(logs + t * positions) for logs, positions, count in tables)
            bound = (K - math.log(TAIL_MASS)) / t
            if t > 0:
                high = min(high, math.ceil(bound))
            else:
                low = max(low, math.floor(bound))
    return low, max(low, high)


def _variance(part: Losses) -> float:
    positions = np.arange(len(part.masses))
    mean = float(part.masses @ positions)
    return float(part.masses @ (positions - mean) ** 2)


def _log_sum_exp(exponents: Array) -> float:
    largest = float(exponents.max())
    return largest + math.log(float(np.exp(exponents - largest).sum()))
