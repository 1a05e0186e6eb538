"""Reduces a history of events to a form that all accountants share.

Every scheme is reduced to one of two cases:

- a Gaussian mechanism that every unit takes part in. All of those together are one Gaussian mechanism;
- an amplified `Step`: the same mechanism on a random batch that a given unit may not be in.

The noise multiplier of an event is always noise over the *actual* sensitivity under the event's own
adjacency (2C for a clipped sum under replace-one), and so is the z of a `Step`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

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
    """The amplified step of an event, or None for a Gaussian mechanism that every unit is in.

    It has the numbers of the event: `compose` replaces those that bounds cannot be computed with.
    """
    if event.sampling not in AMPLIFICATION:
        names = ", ".join(repr(str(s)) for s in Sampling)
        raise UnsupportedEventError(f"No accountant bounds sampling={str(event.sampling)!r}: use one of {names}.")
    amplification = AMPLIFICATION[event.sampling]
    if amplification is None or event.sample_rate == 1 or event.noise_multiplier < SMALLEST_NOISE:
        return None
    return Step(amplification, event.sample_rate, event.noise_multiplier)
