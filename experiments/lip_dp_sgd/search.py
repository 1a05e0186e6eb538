"""The same trials for every method: points spread over a space, then points around the best of them.

The space is that of the paper's table 3, extended where DP-SGD or weight clipping do better: smaller gradient norms,
larger rates and batches. The noise is not searched: it follows from the budget.

Networks for images start with orthogonal weights, for every method: the bounds of weight clipping are then several
times closer to the gradients, and DP-SGD has more signal too. Their rates are smaller and their batches larger than
those of tables: with more noise than signal, Adam's steps are mostly noise, and many steps undo the initial weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clipwise.tune.subject import Choice, Dimension, Range
from experiments.harness.search import Effort, Search, halton
from experiments.lip_dp_sgd.sets import DIGITS, IMAGES
from experiments.lip_dp_sgd.trial import TITLES, Trial

# For fewer than 5,000 records, of which 1/64 would be a batch of a few.
_FEW = ("breast_cancer", "german_credit", "students_dropout")


TABLE_EFFORT, IMAGE_EFFORT, QUICK_EFFORT = Effort(20, 10), Effort(8, 4), Effort(2, 1)


@dataclass(frozen=True)
class Row:
    """One method on one data set, with or without norm, at one epsilon.

    `network` is the name of a model, instead of that of the data set.
    """

    data: str
    norm: str
    method: str
    epsilon: float
    network: str | None = None

    @property
    def label(self) -> str:
        """The name of the row in results."""
        return f"{self.data}/{self.norm}/{self.method}" + (f"/{self.network}" if self.network else "")

    @property
    def title(self) -> str:
        """The method, for readers."""
        return TITLES[self.method] + (f", {self.network}" if self.network else "")


def space(row: Row) -> dict[str, Dimension]:
    """The search space of a row."""
    is_image = row.data in IMAGES
    rates: tuple[float, ...] = (1 / 16, 1 / 4) if is_image else (1 / 64, 1 / 16, 1 / 4)
    if row.data in _FEW:
        rates = (1 / 24, 1 / 8, 1 / 3)
    epochs: tuple[int, ...] = (6, 16) if is_image else (8, 32)
    if row.data == DIGITS:  # a quick check
        rates, epochs = (1 / 8,), (1,)
    smallest = 0.1 if row.method == "dp-sgd" else 1.0 if is_image else 0.5
    found: dict[str, Dimension] = {
        "max_norm": Range(smallest, 15, log=True),
        "learning_rate": Range(3e-4, 1e-2, log=True) if is_image else Range(1e-3, 1e-1, log=True),
        "sample_rate": Choice(rates),
        "epochs": Choice(epochs),
    }
    if row.norm == "bounded":
        # Four norms in a row multiply the bounds by alpha^-4.
        found["alpha"] = Range(0.3, 3, log=True) if is_image else Range(0.05, 1, log=True)
    return found


def trial(row: Row, chosen: dict[str, Any]) -> Trial:
    """The setting of a row."""
    first = "orthogonal" if row.data in IMAGES else "usual"
    return Trial(row.data, row.method, row.norm, row.epsilon, first_weights=first, network=row.network, **chosen)


def effort_of(row: Row, quick: bool) -> Effort:
    """The number of trials of a row, the same for every method."""
    if quick:
        return QUICK_EFFORT
    return IMAGE_EFFORT if row.data in IMAGES else TABLE_EFFORT


SEARCH = Search(space, trial, halton, effort_of)
