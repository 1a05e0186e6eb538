"""Results by row: the tested runs of the setting that was chosen, and the best of several methods."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.backprop_clipping.grid import best
from experiments.backprop_clipping.search import Row
from experiments.backprop_clipping.trial import Trial
from experiments.harness import report
from experiments.harness.rounds import trial_key
from experiments.harness.shown import Shown
from experiments.harness.store import Cell

ERRORS = 2.0  # standard errors beyond which a difference is taken for one


@dataclass(frozen=True)
class Difference:
    """Of two means, in points, with its standard error. With one run each nothing is known of that."""

    points: float
    error: float | None

    @property
    def verdict(self) -> int:
        """1 if the first is better, -1 if the second is, 0 if this is open."""
        if self.error is None or abs(self.points) <= ERRORS * self.error:
            return 0
        return 1 if self.points > 0 else -1

    def __str__(self) -> str:
        return f"{self.points:+.1f}" if self.error is None else f"{self.points:+.1f} ± {self.error:.1f}"


class Results(Shown):
    """The runs of a store by row."""

    def tested(self, row: Row) -> list[Cell]:
        """Runs on the test part, whichever figure asked for them, in the order of their seeds."""
        found = {
            cell["seed"]: cell
            for figure in ("table-1", "5")
            for cell in self.at(figure, row.label, row.epsilon)
            if cell["judged_by"] == "test" and "accuracy" in cell
        }
        return [found[seed] for seed in sorted(found)]

    def chosen(self, row: Row) -> Trial | None:
        """The trial that did best on the validation part."""
        return best(row, self.quick, self.cells)

    def accuracy(self, row: Row) -> str:
        """In words, in percent."""
        return report.accuracy(self.tested(row))

    def mean(self, row: Row) -> float | None:
        """In percent."""
        found = report.accuracies(self.tested(row))
        return statistics.fmean(found) if found else None

    def best_of(self, rows: Sequence[Row]) -> Row | None:
        """The row whose chosen trial was best on the *validation* part: the test part chooses nothing."""
        scored = []
        for place, row in enumerate(rows):
            trial = self.chosen(row)
            if trial is not None and self.tested(row):
                cell = self.cells[trial_key(trial)]
                scored.append((cell["accuracy"], -cell["loss"], -place))
        return rows[-max(scored)[2]] if scored else None

    def difference(self, first: Row, second: Row) -> Difference | None:
        """Of the means of two rows."""
        one, two = (report.accuracies(self.tested(row)) for row in (first, second))
        if not one or not two:
            return None
        error = None
        if len(one) > 1 and len(two) > 1:
            error = math.hypot(report.standard_error(one), report.standard_error(two))
        return Difference(statistics.fmean(one) - statistics.fmean(two), error)
