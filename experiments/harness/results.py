"""Finished runs by place in the results, and means over seeds with their errors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.harness import report
from experiments.harness.store import Cell

CLEAR = 2.0  # standard errors above which a difference counts


@dataclass(frozen=True)
class Measured:
    """A mean in percent and its standard error, which is None for a single run."""

    mean: float
    error: float | None

    def __sub__(self, other: Measured) -> Measured:
        if self.error is None or other.error is None:
            return Measured(self.mean - other.mean, None)
        return Measured(self.mean - other.mean, math.hypot(self.error, other.error))

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + ("" if self.error is None else f" ± {self.error:.2f}")

    def signed(self, digits: int = 2) -> str:
        """As a difference."""
        error = "" if self.error is None else f" ± {self.error:.{digits}f}"
        return f"{self.mean:+.{digits}f}{error}"

    def exceeds(self, value: float) -> bool | None:
        """Whether it is clearly above the value; None without a standard error."""
        return None if self.error is None else self.mean - value > CLEAR * self.error

    @property
    def verdict(self) -> int:
        """For a difference: 1 if the first is better, -1 if the second is, 0 if neither is clear."""
        if self.error is None or abs(self.mean) <= CLEAR * self.error:
            return 0
        return 1 if self.mean > 0 else -1


def measured(cells: Sequence[Cell]) -> Measured | None:
    """The mean over finished runs; None if there are none."""
    found = report.accuracies(list(cells))
    if not found:
        return None
    return Measured(statistics.fmean(found), report.standard_error(found) if len(found) > 1 else None)


class Shown:
    """Runs by figure, row and budget, either quick runs or full ones."""

    def __init__(self, cells: Mapping[str, Cell], quick: bool) -> None:
        self.cells, self.quick = cells, quick
        self._shown: dict[tuple[str, str, float | None], list[Cell]] = {}
        for cell in cells.values():
            for place in cell.get("shown", []):
                if bool(place.get("quick")) == quick:
                    key = (place["figure"], place["row"], place.get("budget"))
                    self._shown.setdefault(key, []).append(cell)

    def has(self, figure: str) -> bool:
        """Whether anything of a figure was run."""
        return any(name == figure for name, _, _ in self._shown)

    def at(self, figure: str, row: str, epsilon: float | None = None) -> list[Cell]:
        """All runs of one place."""
        return self._shown.get((figure, row, epsilon), [])

    def tested_at(self, figure: str, row: str, epsilon: float | None) -> list[Cell]:
        """Finished test runs of a place, in the order of their seeds."""
        found = [c for c in self.at(figure, row, epsilon) if c["judged_by"] == "test" and "accuracy" in c]
        return sorted(found, key=lambda cell: int(cell["seed"]))
