"""Upper bound on the distribution of a sum of independent privacy losses, by FFT.

The rounding error of an FFT is relative to the largest mass, and delta is in the tail, so the masses are tilted first:
the mass at position j is multiplied by e^(theta j - kappa), with kappa such that they sum to 1 again. The sum of tilted
losses is the tilted sum, e^(theta j - K) times the true masses, with K the sum of the kappas; theta moves its bulk to
where delta is. After the FFT every mass is raised by a bound on its error (`Spectrum`) and tilted back. The result is a
bound at every epsilon, and tight around the delta that it was computed for, however small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from clipwise.accounting.gaussian import Array
from clipwise.accounting.losses import UNIT_ROUNDOFF, Losses

# Covers the rounding of the FFT error bounds themselves.
MARGIN = 1.01
# The share of delta that tails may cost, and the share of the tilted mass that may lie outside the window.
TAIL_SHARE = 1e-7
# Tails are trimmed at least as finely as for this level.
TAIL_LEVEL = 1e-6
# Positions further than this from the mean are grouped, with widths that grow by this factor.
NEAR = 1024
WIDENING = 0.01
# How much a tilt may lengthen the window, and the longest window if no tilt is short enough.
LENGTHENING = 1.2
LONGEST = 2**20
# No tilt changes a mass by more than this power of e.
STEEPEST = 600.0


def tail_mass(level: float) -> float:
    """The upper tail mass that a sum for deltas around `level` may leave out."""
    return TAIL_SHARE * min(level, TAIL_LEVEL)


def add_up(parts: Sequence[tuple[Losses, int]], level: float = 1.0) -> Losses:
    """The distribution of the sum of independent losses, each taken a number of times.

    Masses are convolved by FFT on a window. Mass above the window counts as infinite loss, and mass below is moved up
    to its lowest point (mass that wraps around is counted again, never missed). The parts have the
    same grid spacing. The result is tight for deltas around `level`, and valid for any.
    """
    total = sum(count for _, count in parts)
    trimmed = [(_trimmed(part, tail_mass(level) / total), count) for part, count in parts]
    tables = [_Table(part, count) for part, count in trimmed]
    theta = _affordable(tables, _tilt(tables, level), level)
    tilted = [table.tilted(theta) for table in tables]
    K = math.fsum(table.count * kappa for table, (_, kappa) in zip(tables, tilted, strict=True))
    low, high = _window(tables, theta, K, level)
    size = max(high - low + 1, max(len(table.masses) for table in tables))
    spectrum = Spectrum(fft.next_fast_len(size, real=True))
    slack = 0.0
    for table, (weights, kappa) in zip(tables, tilted, strict=True):
        spectrum.multiply(weights, table.count)
        reach = theta * len(table.masses) + abs(kappa)
        slack += 4 * UNIT_ROUNDOFF * table.count * (reach + 4)
    origin = low + sum(table.count * table.centre for table in tables)
    found = spectrum.masses(origin)[: high - low + 1]
    untilt = K - theta * np.arange(low, high + 1, dtype=np.float64)
    slack += 4 * UNIT_ROUNDOFF * float(np.abs(untilt).max() + abs(K))
    masses = found * np.exp(np.minimum(untilt + slack, 700.0))
    masses[0] += 1.0 if theta > 0 else MARGIN * tail_mass(level)
    first = sum(table.count * (table.first + table.centre) for table in tables) + low
    return Losses(parts[0][0].interval, first, masses, MARGIN * tail_mass(level) + _lost(trimmed))


def _lost(parts: Sequence[tuple[Losses, int]]) -> float:
    """The mass of sums with an infinite loss among their terms: with parts of mass 1, 1 - prod (1 - lost).

    Parts that were rounded up have a total slightly above 1, and so has this mass.
    """
    largest = 1 - UNIT_ROUNDOFF
    kept = sum(count * math.log1p(-min(part.lost, largest)) for part, count in parts)
    masses = [(float(part.masses.sum()) + part.lost, count) for part, count in parts]
    growth = sum(count * math.log(mass) for mass, count in masses if mass > 1)
    return -math.expm1(kept) * math.exp(min(growth, 700.0)) * (1 + 1e-9)


def _trimmed(part: Losses, tail: float) -> Losses:
    """Without the ends that hold less than `tail`: the upper end becomes infinite loss, the lower is moved up."""
    size = len(part.masses)
    start = min(int(np.searchsorted(np.cumsum(part.masses), tail)), size - 1)
    stop = max(size - int(np.searchsorted(np.cumsum(part.masses[::-1]), tail)), start + 1)
    masses = part.masses[start:stop].copy()
    masses[0] += part.masses[:start].sum() * (1 + 1e-9)
    return Losses(part.interval, part.first + start, masses, part.lost + float(part.masses[stop:].sum()))


class _Table:
    """One of the losses in the sum, with positions relative to its mean."""

    def __init__(self, part: Losses, count: int) -> None:
        self.masses, self.first, self.count = part.masses, part.first, count
        index = np.arange(len(part.masses), dtype=np.float64)
        self.centre = round(float(part.masses @ index) / float(part.masses.sum()))
        self.positions = index - self.centre
        self._knots, masses = _gathered(self.positions, self.masses)
        with np.errstate(divide="ignore"):
            self._logs = np.log(masses)

    def tilted(self, theta: float) -> tuple[Array, float]:
        """The masses times e^(theta j - kappa), which sum to 1, and kappa."""
        shift = theta * max(float(self.positions[-1]), 0.0)
        weights = self.masses * np.exp(theta * self.positions - shift)
        total = float(weights.sum())
        return weights / total, shift + math.log(total)

    def cumulants(self, t: float) -> tuple[float, float, float]:
        """Upper bounds on log sum m e^(t j), and on the mean and variance of j under these weights."""
        exponents = self._logs + t * self._knots
        largest = float(exponents.max())
        weights = np.exp(exponents - largest)
        total = float(weights.sum())
        mean = float(weights @ self._knots) / total
        return largest + math.log(total), mean, float(weights @ (self._knots - mean) ** 2) / total


def _gathered(positions: Array, masses: Array) -> tuple[Array, Array]:
    """Fewer positions, dense around 0 and sparse further out, with every mass split between its neighbours.

    A split keeps the mean, so it can only raise the sum of m e^(t j), for either sign of t.
    """
    reach = max(abs(float(positions[0])), abs(float(positions[-1])))
    if reach <= 2 * NEAR:
        return positions, masses
    far = np.geomspace(NEAR, reach + 1, math.ceil(math.log((reach + 1) / NEAR) / WIDENING))
    far = np.unique(np.ceil(far))
    knots = np.concatenate([-far[::-1], np.arange(-NEAR + 1.0, NEAR), far])
    knots = knots[np.searchsorted(knots, positions[0], "right") - 1 : np.searchsorted(knots, positions[-1]) + 1]
    below = np.clip(np.searchsorted(knots, positions, "right") - 1, 0, len(knots) - 2)
    share = (positions - knots[below]) / (knots[below + 1] - knots[below])
    size = len(knots)
    gathered = np.zeros(size)
    gathered += np.bincount(below, masses * (1 - share), size)
    gathered += np.bincount(below + 1, masses * share, size)
    return knots, gathered


def _cumulants(tables: Sequence[_Table], t: float) -> tuple[float, float, float]:
    found = [(table.count, *table.cumulants(t)) for table in tables]
    return (
        math.fsum(count * k for count, k, _, _ in found),
        math.fsum(count * mean for count, _, mean, _ in found),
        math.fsum(count * variance for count, _, _, variance in found),
    )


def _affordable(tables: Sequence[_Table], theta: float, level: float) -> float:
    """The tilt, or a smaller one if a heavy tail would make the window too long.

    It stays large enough to hide rounding errors: they are about e^(K - theta x) times 1e-12 per step beyond x, and
    matter where the tail mass falls to `level`.
    """
    low, high = _window(tables, 0.0, _cumulants(tables, 0.0)[0], level)
    longest = LENGTHENING * max(high - low, *(len(table.masses) for table in tables))
    rounding = math.log(1e-12 * sum(table.count for table in tables))
    while theta > 0:
        low, high = _window(tables, theta, _cumulants(tables, theta)[0], level)
        gentler = theta / 2 if theta * high > 1e-3 else 0.0
        shown = rounding + _cumulants(tables, gentler)[0] - gentler * _reach(tables, level)
        if high - low <= (LONGEST if shown > math.log(1e-4 * level) else longest):
            break
        theta = gentler
    return theta


def _reach(tables: Sequence[_Table], level: float) -> float:
    """About where the tail mass of the sum falls to `level`, by Chernoff's bound."""
    depth = -math.log(level)
    deviation = math.sqrt(max(_cumulants(tables, 0.0)[2], 1e-6))
    orders = math.sqrt(2 * depth) / deviation * 2.0 ** np.arange(-12, 3)
    return min((_cumulants(tables, float(t))[0] + depth) / float(t) for t in orders)


def _tilt(tables: Sequence[_Table], level: float) -> float:
    """The theta for which the tilted sum lies half way out to `level`: theta K' - K = -log(level) / 2.

    The left side is the exponent of Chernoff's bound at K'. It rises with theta, for a Gaussian sum as theta^2.
    Any theta gives a bound, so a rough one is enough, and half way keeps all digits that matter.
    """
    target = -0.5 * math.log(level)
    if target == 0:
        return 0.0
    steepest = STEEPEST / max(len(table.masses) for table in tables)
    low, high = 0.0, steepest
    theta = min(math.sqrt(2 * target / max(_cumulants(tables, 0.0)[2], 1e-6)), steepest)
    for _ in range(40):
        K, mean, _ = _cumulants(tables, theta)
        depth = theta * mean - K
        if 0.8 * target < depth < 1.2 * target or (theta == steepest and depth < target):
            break
        low, high = (theta, high) if depth < target else (low, theta)
        theta *= math.sqrt(target / max(depth, target / 16))
        if not low < theta < high:
            theta = 0.5 * (low + high)
    return theta


def _window(tables: Sequence[_Table], theta: float, K: float, level: float) -> tuple[int, int]:
    """The window that holds the tilted sum except TAIL_SHARE, and the sum itself except tail_mass(level) above.

    K is K(theta). Chernoff: of the tilted sum the part above x is at most e^(K(theta + t) - K - t x), so
    x = (K(theta + t) - K - log TAIL_SHARE) / t is high enough for any t > 0, and low enough for any t < 0.
    """
    variance = _cumulants(tables, theta)[2]
    lowest = -sum(table.count * table.centre for table in tables)
    highest = lowest + sum(table.count * (len(table.masses) - 1) for table in tables)
    tail = math.log(tail_mass(level))
    share = math.log(TAIL_SHARE) if theta > 0 else tail
    # From an order for a sum as heavy-tailed as its longest term to twice the best order for a Gaussian sum.
    largest = 2 * math.sqrt(-2 * tail) / max(math.sqrt(variance), 1e-3)
    smallest = min(1 / max(len(table.masses) for table in tables), largest / 8)
    orders = np.geomspace(smallest, largest, 1 + math.ceil(math.log(largest / smallest, 3)))
    high = tilted_high = math.inf
    low = -math.inf
    for t in map(float, orders):
        high = min(high, (_cumulants(tables, t)[0] - tail) / t)
        tilted_high = min(tilted_high, (_cumulants(tables, theta + t)[0] - K - share) / t)
        low = max(low, -(_cumulants(tables, theta - t)[0] - K - share) / t)
    first, last = max(lowest, math.floor(low)), min(highest, math.ceil(max(high, tilted_high)))
    return first, max(first, last)


class Spectrum:
    """The Fourier transform of a sum of positions on a circle, with a bound on its error.

    Each output of an FFT sums its n inputs in a tree of height about log2(n), and each level adds an error of a few u
    times the sum of their absolute values, which is 1 here: |error| <= e = 8 u log2(n). With A = |computed| + e, a
    product of T factors is off by at most the product of all A times sum e / A + 4 u T, for the errors of the factors
    and of multiplying them. The inverse FFT averages this over the frequencies, so the bound is small if spectra decay,
    as those of many steps do.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._rounding = 8 * UNIT_ROUNDOFF * math.log2(size + 2) * MARGIN
        self._values = np.ones(size // 2 + 1, dtype=np.complex128)
        self._largest = np.ones(size // 2 + 1)
        self._error = np.zeros(size // 2 + 1)

    def multiply(self, masses: Array, count: int) -> None:
        """Add `count` losses of this distribution to the sum."""
        transformed = fft.rfft(masses, self._size)
        largest = np.abs(transformed) + self._rounding
        self._values *= _power(transformed, count)
        self._largest *= _power(largest, count)
        self._error += count * (self._rounding / largest + 4 * UNIT_ROUNDOFF)

    def masses(self, origin: int) -> Array:
        """The masses of the positions from `origin` on, rounded up."""
        error = MARGIN * self._largest * (self._error + self._rounding)
        rounding = 2 * float(error.sum()) / self._size
        found: Array = np.maximum(fft.irfft(self._values, self._size), 0.0) + rounding
        return np.roll(found, -(origin % self._size))


def _power(base: NDArray[Any], exponent: int) -> NDArray[Any]:
    """base ** exponent by squaring: exponent - 1 roundings in total, whereas logarithms have no such bound."""
    base = base.copy()
    while not exponent & 1:
        base *= base
        exponent >>= 1
    result: NDArray[Any] = base.copy()
    while exponent := exponent >> 1:
        base *= base
        if exponent & 1:
            result *= base
    return result
