"""Results by row: the test runs of the chosen setting, and the best of several methods."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from experiments.backprop_clipping.search import SEARCH, Row
from experiments.backprop_clipping.trial import Trial
from experiments.harness import report
from experiments.harness.results import Measured, Shown, measured
from experiments.harness.search import trial_key
from experiments.harness.store import Cell


class Results(Shown):
    """The runs of a store by row."""

    def tested(self, row: Row) -> list[Cell]:
        """Test runs of all figures, in the order of their seeds."""
        found = {
            cell["seed"]: cell for figure in ("table-1", "5") for cell in self.tested_at(figure, row.label, row.epsilon)
        }
        return [found[seed] for seed in sorted(found)]

    def chosen(self, row: Row) -> Trial | None:
        """The trial that did best on the validation part."""
        return SEARCH.best(row, self.quick, self.cells)

    def accuracy(self, row: Row) -> str:
        """The accuracy in percent, as text."""
        return report.accuracy(self.tested(row))

    def mean(self, row: Row) -> float | None:
        """In percent."""
        found = report.accuracies(self.tested(row))
        return statistics.fmean(found) if found else None

    def best_of(self, rows: Sequence[Row]) -> Row | None:
        """The row with the best chosen trial on the *validation* part."""
        scored = []
        for place, row in enumerate(rows):
            trial = self.chosen(row)
            if trial is not None and self.tested(row):
                cell = self.cells[trial_key(trial)]
                scored.append((cell["accuracy"], -cell["loss"], -place))
        return rows[-max(scored)[2]] if scored else None

    def difference(self, first: Row, second: Row) -> Measured | None:
        """The difference of the means of two rows, in points."""
        one, two = (measured(self.tested(row)) for row in (first, second))
        return None if one is None or two is None else one - two
