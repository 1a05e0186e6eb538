"""Step times of several methods, measured in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles

Act = Callable[[], None]

_BLOCK = 0.02  # seconds: short steps are timed in blocks, so that the clock's resolution does not matter


@dataclass(frozen=True)
class Effort:
    """The effort for one measurement.

    Args:
        rounds: the maximum number of rounds.
        least_rounds: the minimum number of rounds, unless they take longer than `cell_seconds`.
        enough_seconds: no further round after this time.
        cell_seconds: the limit for one measurement.
        cpu_time: whether steps are timed by the processor time of the process, which other jobs of a loaded machine
            affect less. The limits are always those of a wall clock.
    """

    rounds: int = 15
    least_rounds: int = 3
    enough_seconds: float = 1.5
    cell_seconds: float = 60.0
    cpu_time: bool = False


@dataclass(frozen=True)
class Timing:
    """Seconds of a step: medians and quartiles over the rounds.

    `ratio` is the median of the ratios of the rounds, because the load of the machine changes between rounds.
    """

    seconds: float
    lower: float
    upper: float
    reference_seconds: float
    ratio: float
    rounds: int


@dataclass(frozen=True)
class Contender:
    """A step after warm-up, and the number of steps per timed block."""

    act: Act
    block: int


@dataclass(frozen=True)
class Rounds:
    """Seconds of a step by contender, one value per round."""

    seconds: dict[str, list[float]]

    def ratio(self, name: str, reference: str) -> float:
        """The median of the ratios of the rounds."""
        pairs = zip(self.seconds[name], self.seconds[reference], strict=True)
        return median(own / other for own, other in pairs)

    def timing(self, name: str, reference: str) -> Timing:
        """The times of a contender, with its ratio to the reference."""
        mine, theirs = self.seconds[name], self.seconds[reference]
        lower, _, upper = quantiles(mine, n=4, method="inclusive") if len(mine) > 1 else mine * 3
        ratio = self.ratio(name, reference)
        return Timing(median(mine), lower, upper, median(theirs), ratio, len(mine))


def settled(act: Act, steps: int, most_seconds: float, wait: Act) -> Contender:
    """Make the first steps, which are not counted: `steps` of them, or fewer if they take too long."""
    start = time.perf_counter()
    for _ in range(steps):
        last = _seconds(act, 1, wait, time.perf_counter)
        if time.perf_counter() - start > most_seconds:
            break
    return Contender(act, max(1, round(_BLOCK / last)))


def interleave(contenders: Mapping[str, Contender], effort: Effort, wait: Act) -> Rounds:
    """Time all contenders in turns, so that other load on the machine affects all alike.

    Args:
        contenders: by name. Each is timed once per round, in this order.
        effort: the limits of rounds and time.
        wait: returns when the device has finished its queued work.
    """
    clock = time.process_time if effort.cpu_time else time.perf_counter
    start = time.perf_counter()
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(1, effort.rounds + 1):
        begin = time.perf_counter()
        for name, contender in contenders.items():
            taken[name].append(_seconds(contender.act, contender.block, wait, clock))
        now = time.perf_counter()
        if number >= effort.least_rounds and now - start > effort.enough_seconds:
            break
        if 2 * now - begin - start > effort.cell_seconds:  # one more round would exceed it
            break
    return Rounds(taken)


def _seconds(act: Act, count: int, wait: Act, clock: Callable[[], float]) -> float:
    wait()
    start = clock()
    for _ in range(count):
        act()
    wait()
    return (clock() - start) / count
