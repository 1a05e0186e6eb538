"""Noise schedules: many different steps, rounded to few kinds, each slightly worse than the true step.

Less noise or a larger sampling rate can only cost more. So z is rounded down, and the rate up if there are many rates,
which keeps the bound valid. 256 kinds are within half a percent for a schedule from z = 2 down to 0.8.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from clipwise.accounting.composition import Composition, Step
from clipwise.accounting.gaussian import Array
from clipwise.privacy import Amplification

# Schedules usually have few rates; if not, the rates get this many kinds and the noise gets the rest.
MOST_RATES = 8
# The resolution at which a schedule is read before its kinds are chosen.
BINS = 4096


def with_few_kinds(total: Composition, most: int) -> Composition:
    """The composition if it has at most `most` kinds of steps, otherwise one with `most` kinds that costs more."""
    if len(total.steps) <= most:
        return total
    kinds: dict[Step, int] = {}
    present = {step.amplification for step, _ in total.steps}
    for amplification in Amplification:
        if amplification in present:
            members = [(*step[1:], count) for step, count in total.steps if step.amplification is amplification]
            rates, noises, counts = (np.array(column) for column in zip(*members, strict=True))
            for step, count in _gathered(amplification, rates, noises, counts, most // len(present)):
                kinds[step] = kinds.get(step, 0) + count
    return replace(total, steps=tuple(kinds.items()))


def _gathered(
    amplification: Amplification, rates: Array, noises: Array, counts: Array, most: int
) -> list[tuple[Step, int]]:
    if len(np.unique(rates)) > MOST_RATES:
        rates = _rounded_up(rates, MOST_RATES)
    different = np.unique(rates)
    found = []
    for rate in different:
        here = np.flatnonzero(rates == rate)
        points = _points(noises[here], counts[here], float(rate), max(1, most // len(different)))
        index = np.maximum(np.searchsorted(points, noises[here], side="right") - 1, 0)
        sums = np.zeros(len(points), dtype=object)  # whole numbers of any size
        np.add.at(sums, index, counts[here].astype(object))
        found += [
            (Step(amplification, float(rate), float(z)), int(n)) for z, n in zip(points, sums, strict=True) if n > 0
        ]
    return found


def _points(noises: Array, counts: Array, rate: float, most: int) -> Array:
    """Multipliers to round down to, in rising order; the first is the smallest of all.

    They are densest where rounding costs most. A step rounded by d log z costs about w d log z more, with w its
    Renyi divergence of order 2, log(1 + q^2 (e^(1/z^2) - 1)); the sum is least for a density like the root of w.
    """
    low, high = np.log(noises.min()), np.log(noises.max())
    if low == high:
        return noises[:1]
    weights = counts * np.log1p(rate**2 * np.expm1(np.minimum(noises**-2.0, 700.0)))
    weights /= weights.sum()
    histogram, edges = np.histogram(np.log(noises), BINS, (low, high), weights=weights)
    density = np.sqrt(histogram) + 1e-3
    cumulative = np.concatenate([[0.0], np.cumsum(density)])
    inner = np.interp(np.linspace(0, cumulative[-1], most + 1)[1:-1], cumulative, edges)
    return np.unique(np.concatenate([[noises.min()], np.maximum(np.exp(inner), noises.min())]))


def _rounded_up(rates: Array, most: int) -> Array:
    points = np.append(np.geomspace(rates.min(), rates.max(), most + 1)[1:-1], rates.max())
    rounded: Array = points[np.searchsorted(points, rates)]
    return rounded
