"""Accuracies of several seeds as a mean and a standard error, in percent, and their differences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.harness import report
from experiments.harness.store import Cell

CLEAR = 2.0  # standard errors that a difference must have


@dataclass(frozen=True)
class Measured:
    """A mean and its standard error; None where one run does not tell."""

    mean: float
    error: float | None

    def __sub__(self, other: Measured) -> Measured:
        if self.error is None or other.error is None:
            return Measured(self.mean - other.mean, None)
        return Measured(self.mean - other.mean, math.hypot(self.error, other.error))

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + ("" if self.error is None else f" ± {self.error:.2f}")

    @property
    def signed(self) -> str:
        """As a difference."""
        return f"{self.mean:+.2f}" + ("" if self.error is None else f" ± {self.error:.2f}")

    def exceeds(self, value: float) -> bool | None:
        """Whether it is clearly above; None where no error is known."""
        return None if self.error is None else self.mean - value > CLEAR * self.error


def measured(cells: Sequence[Cell]) -> Measured | None:
    """Of the runs that came through; None if there are none."""
    found = report.accuracies(list(cells))
    if not found:
        return None
    return Measured(statistics.fmean(found), report.standard_error(found) if len(found) > 1 else None)
