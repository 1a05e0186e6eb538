"""What a run has cost, and what it may cost: from events to epsilon, delta and noise.

Events are data (`clipwise.privacy.Event`); accountants interpret them, and an event that an accountant cannot
bound is refused. Every figure is an upper bound:

- `pld` (privacy loss distributions) is tight, and takes milliseconds to tenths of a second;
- `rdp` (Renyi divergences) is looser, and takes microseconds for a new step: a live figure while training;
- `dp-accounting` is that library's own PLD, a second opinion on the first, without fixed-size batches.

A noise multiplier is always the noise's standard deviation over the sensitivity under the adjacency in
question: std / C for a clipped sum under zero-out, std / 2C under replace-one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from clipwise.accounting import arguments, calibrate, pld, rdp, reference
from clipwise.privacy import Adjacency, Entry, Event, Sampling

__all__ = ["delta", "delta_of", "epsilon", "epsilon_of", "noise_multiplier", "steps_within"]

_ACCOUNTANTS = {"pld": pld, "rdp": rdp, "dp-accounting": reference}


def epsilon(
    *,
    noise_multiplier: float,
    sample_rate: float | None = None,
    steps: int,
    delta: float,
    sampling: str | Sampling = "poisson",
    adjacency: str | Adjacency | None = None,
    period: int | None = None,
    accountant: str = "pld",
) -> float:
    """Epsilon of `steps` private steps at `delta`.

    Args:
        noise_multiplier: the noise's standard deviation over the sensitivity under `adjacency`. 0 is allowed,
            and costs an infinite epsilon.
        sample_rate: the probability that a given unit is in a batch.
        steps: how many steps.
        delta: the delta of the guarantee.
        sampling: how batches are drawn: "poisson", "fixed-size", "partition", "shuffled" or "full".
        adjacency: "zero-out" or "replace-one"; by default that of the scheme.
        period: for "shuffled", the number of steps in an epoch; sample_rate is then 1 / period.
        accountant: "pld" (tight), "rdp" (cheap) or "dp-accounting" (a second opinion).
    """
    event = arguments.event(noise_multiplier, sample_rate, sampling, adjacency, period)
    return epsilon_of([Entry(event, arguments.whole("steps", steps))], delta, accountant)


def delta(
    *,
    noise_multiplier: float,
    sample_rate: float | None = None,
    steps: int,
    epsilon: float,
    sampling: str | Sampling = "poisson",
    adjacency: str | Adjacency | None = None,
    period: int | None = None,
    accountant: str = "pld",
) -> float:
    """Delta of `steps` private steps at `epsilon`; the other arguments are those of `epsilon`."""
    event = arguments.event(noise_multiplier, sample_rate, sampling, adjacency, period)
    return delta_of([Entry(event, arguments.whole("steps", steps))], epsilon, accountant)


def noise_multiplier(
    *,
    epsilon: float,
    delta: float,
    sample_rate: float | None = None,
    steps: int,
    sampling: str | Sampling = "poisson",
    adjacency: str | Adjacency | None = None,
    period: int | None = None,
) -> float:
    """The smallest noise multiplier for which `steps` steps cost at most `epsilon` at `delta`.

    Rounded up by less than 0.1 percent; the PLD accountant confirms the value returned. The other arguments
    are those of `epsilon`.
    """
    event = arguments.event(1.0, sample_rate, sampling, adjacency, period)
    return calibrate.smallest_noise(
        event,
        arguments.whole("steps", steps),
        arguments.number("epsilon", epsilon, above=0, below=math.inf),
        arguments.number("delta", delta, above=0, below=1),
    )


def epsilon_of(history: Sequence[Entry], delta: float, accountant: str = "pld") -> float:
    """Epsilon at `delta` of everything in a history; 0 for an empty one, inf if anything had no noise."""
    return float(_named(accountant).epsilon(history, arguments.number("delta", delta, above=0, below=1)))


def delta_of(history: Sequence[Entry], epsilon: float, accountant: str = "pld") -> float:
    """Delta at `epsilon` of everything in a history."""
    target = arguments.number("epsilon", epsilon, above=0, below=math.inf, open_end=False)
    return float(_named(accountant).delta(history, target))


def steps_within(history: Sequence[Entry], event: Event, epsilon: float, delta: float, at_most: int) -> int:
    """The largest number of further steps of `event` after `history` within (epsilon, delta), up to `at_most`.

    0 if none. The steps are counted as an entry of their own; to go on with a shuffled epoch that the last
    entry of `history` has begun, leave that entry out and subtract its count from the answer.
    """
    return calibrate.steps_within(
        history,
        event,
        arguments.number("epsilon", epsilon, above=0, below=math.inf, open_end=False),
        arguments.number("delta", delta, above=0, below=1),
        arguments.whole("at_most", at_most),
    )


def _named(accountant: str) -> Any:
    return _ACCOUNTANTS[arguments.one_of("accountant", accountant, _ACCOUNTANTS)]
