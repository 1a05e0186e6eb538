"""Choose a setting on the validation part: trials spread over a space, then trials around the best of them.

A trial is run once, with seed 0. The best one is then run on the test part. All methods get equally many trials.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar

from clipwise.tune.subject import Dimension, point
from experiments.harness.paper import AnySetting, Place, Task, key_of
from experiments.harness.store import Cell

NEAR = 0.25  # distance of the second trials from the best, as a fraction of each dimension
_PRIMES = (2, 3, 5, 7, 11)

Trial = TypeVar("Trial", bound=AnySetting)
Row = TypeVar("Row", bound="AnyRow")


class AnyRow(Protocol):
    """A method on a data set at an epsilon."""

    @property
    def label(self) -> str:
        """The name of the row among results."""

    @property
    def epsilon(self) -> float | None:
        """The budget; None without noise."""


@dataclass(frozen=True)
class Effort:
    """The number of trials per method (spread, and around the best) and of test runs of the best one."""

    spread: int
    near: int
    seeds: int = 0


@dataclass(frozen=True)
class Asked:
    """One requested run: the job, its evaluation part, and its place in the results."""

    job: AnySetting
    seed: int
    judged_by: str
    figure: str
    row: str
    epsilon: float | None = None

    @property
    def key(self) -> str:
        """The same run for several figures has one key."""
        return key_of(self.job, self.judged_by, self.seed)

    def task(self, quick: bool) -> Task:
        """The task for the runner."""
        place = Place(self.figure, self.row, self.job.epochs, quick, self.epsilon)
        return Task(self.job, self.seed, self.judged_by, place)


@dataclass(frozen=True)
class Rounds(Generic[Trial]):
    """The trials of one row.

    Args:
        first: trials spread over the space.
        around: the trials of the second round, from the index of the best first one.
    """

    first: tuple[Trial, ...]
    around: Callable[[int], tuple[Trial, ...]]

    def begun(self, found: Mapping[str, Cell]) -> tuple[Trial, ...]:
        """The trials that can run, given the finished ones by key. The second round needs all of the first."""
        best = winner(self.first, found)
        return self.first if best is None else (*self.first, *self.around(self.first.index(best)))

    def best(self, found: Mapping[str, Cell]) -> Trial | None:
        """The best of both rounds; None if some are missing or all failed."""
        return None if winner(self.first, found) is None else winner(self.begun(found), found)


@dataclass(frozen=True)
class Search(Generic[Row, Trial]):
    """How the rows of a paper get their settings.

    Attributes:
        space: the search space of a row.
        trial: from a row and the chosen values to a setting.
        points: a sequence that fills a cube: from an index (from 1) and a number of dimensions to a point.
        effort: from a row, and whether it is a quick run, to the effort.
    """

    space: Callable[[Row], dict[str, Dimension]]
    trial: Callable[[Row, dict[str, Any]], Trial]
    points: Callable[[int, int], list[float]]
    effort: Callable[[Row, bool], Effort]

    def spread(self, row: Row, count: int) -> tuple[Trial, ...]:
        """The first trials."""
        return _spread(self, row, count)

    def near(self, row: Row, best: int, count: int) -> tuple[Trial, ...]:
        """Trials around the first trial with this number (from 0)."""
        return _near(self, row, best, count)

    def rounds(self, row: Row, quick: bool) -> Rounds[Trial]:
        """All trials of a row."""
        effort = self.effort(row, quick)
        return Rounds(self.spread(row, effort.spread), lambda best: self.near(row, best, effort.near))

    def best(self, row: Row, quick: bool, found: Mapping[str, Cell]) -> Trial | None:
        """The trial that did best on the validation part, when all are finished."""
        return self.rounds(row, quick).best(found)

    def trials(self, row: Row, figure: str, quick: bool, found: Mapping[str, Cell]) -> Iterator[Asked]:
        """The trials that can start now."""
        for trial in self.rounds(row, quick).begun(found):
            yield Asked(trial, 0, "validation", figure, row.label, row.epsilon)

    def chosen_and_tested(
        self, row: Row, figure: str, quick: bool, found: Mapping[str, Cell], seeds: int
    ) -> Iterator[Asked]:
        """Trials of both rounds, then the best of them on the test part."""
        yield from self.trials(row, figure, quick, found)
        chosen = self.best(row, quick, found)
        for seed in range(seeds) if chosen is not None else ():
            assert chosen is not None
            yield Asked(chosen, seed, "test", figure, row.label, row.epsilon)


@lru_cache(maxsize=4096)
def _spread(search: Search[Any, Trial], row: Any, count: int) -> tuple[Trial, ...]:
    space = search.space(row)
    return tuple(search.trial(row, point(space, search.points(i, len(space)))) for i in range(1, count + 1))


@lru_cache(maxsize=4096)
def _near(search: Search[Any, Trial], row: Any, best: int, count: int) -> tuple[Trial, ...]:
    space = search.space(row)
    centre = search.points(best + 1, len(space))
    around = (nearby(centre, search.points(100 + i, len(space))) for i in range(1, count + 1))
    return tuple(search.trial(row, point(space, u)) for u in around)


def trial_key(trial: AnySetting) -> str:
    """The key of a trial in the store."""
    return key_of(trial, "validation", 0)


def winner(trials: Sequence[Trial], found: Mapping[str, Cell]) -> Trial | None:
    """The trial with the best validation accuracy, ties by loss. None if some are missing or all failed."""
    cells = [found.get(trial_key(t), {"unfinished": True}) for t in trials]
    if any("unfinished" in cell for cell in cells):
        return None
    scored = [(c["accuracy"], -c["loss"], -i) for i, c in enumerate(cells) if "accuracy" in c]
    return trials[-max(scored)[2]] if scored else None


def nearby(centre: Sequence[float], away: Sequence[float]) -> list[float]:
    """The point of a smaller cube around `centre`, at the same relative position as `away` in the whole cube."""
    return [min(1.0, max(0.0, c + 2 * NEAR * (a - 0.5))) for c, a in zip(centre, away, strict=True)]


def halton(index: int, dimensions: int) -> list[float]:
    """A point of the Halton sequence: the digits of the index in base p, mirrored at the point, for primes p."""
    found = []
    for base in _PRIMES[:dimensions]:
        value, share, rest = 0.0, 1.0, index
        while rest:
            share /= base
            value += share * (rest % base)
            rest //= base
        found.append(value)
    return found


def evenly(index: int, dimensions: int) -> list[float]:
    """A point of a sequence that fills a cube evenly: 1/2 + index a mod 1, a = (1/p, 1/p^2, ...), p^(d+1) = p + 1."""
    p = 1.0
    for _ in range(64):
        p = (1 + p) ** (1 / (dimensions + 1))
    return [(0.5 + index / p**k) % 1 for k in range(1, dimensions + 1)]
