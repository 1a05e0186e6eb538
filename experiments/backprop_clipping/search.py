"""The same number of trials for every method: points spread over its space, then points around the best of them.

The space follows the paper's figure 1, with additions for private training: larger rates, and SGD besides Adam. The
noise is not searched: it follows from the budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clipwise.tune.subject import Choice, Dimension, Range
from experiments.backprop_clipping.sets import DIGITS
from experiments.backprop_clipping.trial import METHODS, Trial
from experiments.harness.search import Effort, Search, evenly

_RATES = {"adam": Range(1e-3, 3e-2, log=True), "sgd": Range(5e-2, 2.0, log=True)}
_RATES_WITHOUT_NOISE = {"adam": Range(3e-4, 1e-2, log=True), "sgd": Range(1e-2, 0.5, log=True)}


GREY, COLOUR, QUICK = Effort(6, 3, 10), Effort(4, 1, 8), Effort(1, 1, 2)


@dataclass(frozen=True)
class Row:
    """One method on one data set at one epsilon."""

    data: str
    method: str
    epsilon: float | None

    @property
    def label(self) -> str:
        """The name of the row in results."""
        return f"{self.data}/{self.method}"


def effort_of(row: Row, quick: bool) -> Effort:
    """The same for every method."""
    if quick:
        return QUICK
    return COLOUR if row.data == "cifar10" else GREY


def space(row: Row) -> dict[str, Dimension]:
    """The search space of a row.

    Batches are 1/32 or 1/16 of the records: 1,875 or 3,750 of 60,000. C2 is on the scale of one example's loss: below
    1e-3 all gradients are clipped, so that smaller values change only the scale. Without noise, small batches and more
    epochs cost only time.
    """
    rates: tuple[float, ...] = (1 / 32, 1 / 16)
    epochs: tuple[int, ...] = (4, 8) if row.data == "cifar10" else (5, 12)
    if row.epsilon is None:
        rates, epochs = (1 / 256, 1 / 64), (12, 24)
    if row.data == DIGITS:  # a quick check
        rates, epochs = (1 / 4,), (1,)
    found: dict[str, Dimension] = {
        "pace": Range(0, 1),
        "optimizer": Choice(("adam", "sgd")),
        "sample_rate": Choice(rates),
        "epochs": Choice(epochs),
    }
    way = METHODS[row.method]
    if way.clips == "examples":
        found["max_norm"] = Range(0.05, 2, log=True)
    elif way.clips == "layers":
        found["input_norm"] = Range(0.5, 16, log=True)
        if way.mode == "clip":
            found["grad_norm"] = Range(1e-3, 1, log=True)
    return found


def trial(row: Row, chosen: dict[str, Any]) -> Trial:
    """The setting of a row. Each optimizer has its own range of rates; `pace` is the position in it."""
    rates = _RATES_WITHOUT_NOISE if row.epsilon is None else _RATES
    others = {name: value for name, value in chosen.items() if name != "pace"}
    rate = rates[chosen["optimizer"]].at(chosen["pace"])
    return Trial(row.data, row.method, row.epsilon, learning_rate=rate, **others)


SEARCH = Search(space, trial, evenly, effort_of)
