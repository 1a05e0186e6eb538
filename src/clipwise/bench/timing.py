"""How long a step takes, next to a non-private one in the same minute."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles

Act = Callable[[], None]

_BLOCK = 0.02  # seconds: several short steps are timed as one, so that the clock's grain does not count


@dataclass(frozen=True)
class Effort:
    """How much is done for one measurement.

    Args:
        rounds: at most so many.
        least_rounds: at least so many, unless they take longer than `cell_seconds`.
        enough_seconds: no further round after this time.
        cell_seconds: the most for one measurement.
    """

    rounds: int = 15
    least_rounds: int = 3
    enough_seconds: float = 1.5
    cell_seconds: float = 60.0


@dataclass(frozen=True)
class Timing:
    """Seconds of a step: medians and quartiles over the rounds.

    `ratio` is the median of the rounds' own ratios: both sides of a round met the same machine.
    """

    seconds: float
    lower: float
    upper: float
    reference_seconds: float
    ratio: float
    rounds: int


def interleave(step: Act, reference: Act, effort: Effort, wait: Act, settling: int = 2) -> Timing:
    """Time both in turns, so that whatever else the machine does meets both alike.

    Args:
        step: one step of the method.
        reference: one non-private step.
        effort: how long to go on.
        wait: returns when the device has finished what it was asked.
        settling: how many steps of the method are made first and not counted.
    """
    start = time.perf_counter()
    patience = effort.cell_seconds / 4
    counts = [_warm_up(step, settling, patience, wait), _warm_up(reference, 2, patience, wait)]
    taken: list[tuple[float, float]] = []
    while len(taken) < effort.rounds:
        begin = time.perf_counter()
        taken.append((_seconds(step, counts[0], wait), _seconds(reference, counts[1], wait)))
        now = time.perf_counter()
        if len(taken) >= effort.least_rounds and now - start > effort.enough_seconds:
            break
        if 2 * now - begin - start > effort.cell_seconds:  # one more would pass it
            break
    mine, theirs = zip(*taken, strict=True)
    lower, _, upper = quantiles(mine, n=4, method="inclusive") if len(mine) > 1 else mine * 3
    ratio = median(own / other for own, other in taken)
    return Timing(median(mine), lower, upper, median(theirs), ratio, len(taken))


def _warm_up(act: Act, steps: int, most_seconds: float, wait: Act) -> int:
    """Steps that are not counted; returns how many make a block that is long enough to time."""
    start = time.perf_counter()
    for _ in range(steps):
        last = _seconds(act, 1, wait)
        if time.perf_counter() - start > most_seconds:
            break
    return max(1, round(_BLOCK / last))


def _seconds(act: Act, count: int, wait: Act) -> float:
    wait()
    start = time.perf_counter()
    for _ in range(count):
        act()
    wait()
    return (time.perf_counter() - start) / count
