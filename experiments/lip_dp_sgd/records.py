"""Results by row: the test runs of the chosen setting, by seed."""

from __future__ import annotations

import math
import statistics

from clipwise.privacy import rounded_up
from experiments.harness.results import Shown
from experiments.harness.store import Cell
from experiments.lip_dp_sgd.compare import Comparison, compare
from experiments.lip_dp_sgd.search import Row


class Results(Shown):
    """The finished runs of a store by row."""

    def tested(self, figure: str, row: Row, epsilon: float | None = None) -> list[Cell]:
        """Runs on the test part, in the order of their seeds."""
        return self.tested_at(figure, row.label, row.epsilon if epsilon is None else epsilon)

    def trials(self, figure: str, row: Row) -> list[Cell]:
        """Runs on validation parts."""
        found = self.at(figure, row.label, row.epsilon)
        return [cell for cell in found if cell["judged_by"] == "validation"]

    def compared(self, figure: str, first: Row, second: Row, epsilon: float | None = None) -> Comparison | None:
        """Two rows on the seeds that both have."""
        one, two = (
            {int(cell["seed"]): float(cell["accuracy"]) for cell in self.tested(figure, row, epsilon)}
            for row in (first, second)
        )
        seeds = sorted(one.keys() & two.keys())
        return compare([one[s] for s in seeds], [two[s] for s in seeds])


def mean_of(cells: list[Cell], what: str = "accuracy") -> float | None:
    """The mean over seeds."""
    found = [float(cell[what]) for cell in cells if what in cell]
    return statistics.fmean(found) if found else None


def in_words(cells: list[Cell], trials: list[Cell], what: str = "accuracy") -> str:
    """Mean and standard error in percent, or the reason why there is none."""
    found = [100 * float(cell[what]) for cell in cells if what in cell]
    if len(found) > 1:
        error = statistics.stdev(found) / math.sqrt(len(found))
        return f"{statistics.fmean(found):.1f} ± {error:.1f}"
    if found:
        return f"{found[0]:.1f}"
    if trials and all("failed" in cell for cell in trials):
        return str(trials[0]["failed"])
    return "not run"


def largest_epsilon(cells: list[Cell]) -> str:
    """The largest epsilon that a run spent."""
    found = [cell["epsilon"] for cell in cells if cell.get("epsilon") is not None]
    return rounded_up(max(found)) if found else ""
