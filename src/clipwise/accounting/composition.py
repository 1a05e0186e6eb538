"""Reduces a history of events to a form that all accountants share.

Every scheme is reduced to one of two cases:

- a Gaussian mechanism that every unit takes part in. All of those together are one Gaussian mechanism;
- an amplified `Step`: the same mechanism on a random batch that a given unit may not be in.

A schedule of many different steps is rounded to few kinds. Less noise or a larger sampling rate can only cost more, so
z is rounded down, and the rate up if there are many rates, which keeps the bound valid. 256 kinds are within half a
percent for a schedule from z = 2 down to 0.8.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np

from clipwise.accounting.gaussian import Array
from clipwise.errors import ConfigurationError, UnsupportedEventError
from clipwise.privacy import AMPLIFICATION, Amplification, Entry, Event, Sampling

# Outside this range an amplified step is replaced by a worse one that double precision can handle.
SMALLEST_RATE = 1e-12
SMALLEST_NOISE = 1e-2
LARGEST_NOISE = 1e6


class Step(NamedTuple):
    """One amplified step: rate = the probability of taking part, z = noise / sensitivity."""

    amplification: Amplification
    rate: float
    z: float


Steps: TypeAlias = "tuple[tuple[Step, int], ...]"


@dataclass(frozen=True)
class Composition:
    """A history in the form that accountants use."""

    mu: float  # sensitivity / noise of the single Gaussian mechanism equivalent to all unamplified releases
    steps: Steps  # the amplified steps, each with its count
    unamplified_mu: float  # mu of the whole history without amplification: a closed form that always bounds it
    # A bound on the probability that any batch was truncated (truncated Poisson sampling). The other fields bound the
    # history if none was; accountants.py adds the cost of truncation.
    excess: float = 0.0
    # A bound on the probability that a release fails on one of two neighbours (sampling="full"); see truncation.py.
    failure: float = 0.0
    # For participations.py: the steps at which a unit is drawn independently, as ((rate, z), count), including
    # those with too little noise for an amplified step; and mu of all other releases, if a unit takes part in each.
    drawn: tuple[tuple[tuple[float, float], int], ...] = ()
    sure_mu: float = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether nothing was released."""
        return self.mu == 0 and not self.steps


def compose(history: Sequence[Entry]) -> Composition:
    """Reduce a history to a form that accountants can bound, or refuse it."""
    require_one_guarantee(history)
    steps: Counter[Step] = Counter()
    unamplified: Counter[float] = Counter()  # how often a unit takes part, for each noise multiplier
    amplified: Counter[float] = Counter()
    excess: Counter[float] = Counter()
    failure: Counter[float] = Counter()
    drawn: Counter[tuple[float, float]] = Counter()  # for each rate and noise multiplier; random blocks count too
    sure: Counter[float] = Counter()
    for entry in history:
        if entry.count < 0 or entry.count != int(entry.count):
            raise ConfigurationError("history: the count of an entry must be a whole number of at least 0.")
        if entry.count == 0:
            continue
        step = amplified_step(entry.event)
        participations = -(-entry.count // entry.event.period)  # a shuffled epoch that has begun counts as a whole
        z, cut = entry.event.noise_multiplier, entry.event.excess
        (failure if entry.event.sampling is Sampling.FULL else excess)[cut] += entry.count
        if step is None:
            unamplified[z] += participations
        else:
            amplified[z] += participations
            steps[Step(step.amplification, max(step.rate, SMALLEST_RATE), min(step.z, LARGEST_NOISE))] += entry.count
        if AMPLIFICATION[entry.event.sampling] is not None and entry.event.sample_rate < 1 and z > 0:
            drawn[entry.event.sample_rate, z] += entry.count
        else:
            sure[z] += participations
    in_order = tuple(sorted(steps.items(), key=lambda item: (item[0].amplification.value, *item[0][1:])))
    return Composition(
        mu=_mu(unamplified),
        steps=in_order,
        unamplified_mu=_mu(unamplified, amplified),
        excess=_sum_of(excess),
        failure=_sum_of(failure),
        drawn=tuple(sorted(drawn.items())),
        sure_mu=_mu(sure),
    )


def _sum_of(probabilities: Mapping[float, int]) -> float:
    return min(1.0, math.fsum(count * each for each, count in probabilities.items()))


def _mu(*participations: Mapping[float, int]) -> float:
    """mu = sqrt(sum count / z^2), rounded up: each term and the root have a few roundings of 2^-53."""
    squares = [count * (1 / z) * (1 / z) if z > 0 else math.inf for part in participations for z, count in part.items()]
    return math.sqrt(math.fsum(squares)) * (1 + 2.0**-50)


def require_one_guarantee(history: Sequence[Entry]) -> None:
    """Releases compose only if all of them protect the same unit under the same adjacency."""
    if len({(entry.event.adjacency, entry.event.unit) for entry in history}) > 1:
        raise UnsupportedEventError(
            "The history mixes adjacencies or units of privacy, so no single guarantee covers it: account for "
            "the releases of each adjacency and unit separately."
        )


def amplified_step(event: Event) -> Step | None:
    """The amplified step of an event, or None for a Gaussian mechanism that every unit is in."""
    if event.sampling not in AMPLIFICATION:
        names = ", ".join(repr(str(s)) for s in Sampling)
        raise UnsupportedEventError(f"No accountant bounds sampling={str(event.sampling)!r}: use one of {names}.")
    amplification = AMPLIFICATION[event.sampling]
    if amplification is None or event.sample_rate == 1 or event.noise_multiplier < SMALLEST_NOISE:
        return None
    return Step(amplification, event.sample_rate, event.noise_multiplier)


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
