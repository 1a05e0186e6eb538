"""Choosing a setting on the validation part: trials spread over a space, then trials around the best of them.

A trial is done once, with seed 0. The best one is then run on the test part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from experiments.harness.paper import AnySetting, Place, Task, key_of
from experiments.harness.store import Cell

NEAR = 0.25  # how far the second trials are from the best, of each dimension's extent

Trial = TypeVar("Trial", bound=AnySetting)


@dataclass(frozen=True)
class Asked:
    """One run that is asked for: the job, what it is judged by, and where it is shown."""

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
        """For the runner."""
        place = Place(self.figure, self.row, self.job.epochs, quick, self.epsilon)
        return Task(self.job, self.seed, self.judged_by, place)


@dataclass(frozen=True)
class Rounds(Generic[Trial]):
    """The trials of one row.

    Args:
        first: spread over the space.
        around: the second ones, from the number of the best first one.
    """

    first: tuple[Trial, ...]
    around: Callable[[int], tuple[Trial, ...]]

    def begun(self, found: Mapping[str, Cell]) -> tuple[Trial, ...]:
        """Those that can be run, from the finished ones by key: the second round needs all of the first."""
        best = winner(self.first, found)
        return self.first if best is None else (*self.first, *self.around(self.first.index(best)))

    def best(self, found: Mapping[str, Cell]) -> Trial | None:
        """The best of both rounds; None as long as some are missing, and if all have failed."""
        return None if winner(self.first, found) is None else winner(self.begun(found), found)


def trial_key(trial: AnySetting) -> str:
    """Under which the run of a trial lies in the store."""
    return key_of(trial, "validation", 0)


def winner(trials: Sequence[Trial], found: Mapping[str, Cell]) -> Trial | None:
    """The best accuracy on the validation part; of equals the smaller loss. None if some are missing, or all failed."""
    cells = [found.get(trial_key(t), {"unfinished": True}) for t in trials]
    if any("unfinished" in cell for cell in cells):
        return None
    scored = [(c["accuracy"], -c["loss"], -i) for i, c in enumerate(cells) if "accuracy" in c]
    return trials[-max(scored)[2]] if scored else None


def nearby(centre: Sequence[float], away: Sequence[float]) -> list[float]:
    """The point of a cube around `centre` that is to it as `away` is to the middle of the whole cube."""
    return [min(1.0, max(0.0, c + 2 * NEAR * (a - 0.5))) for c, a in zip(centre, away, strict=True)]
