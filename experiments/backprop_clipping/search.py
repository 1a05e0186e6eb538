"""The same number of trials for every method: points spread over its space, then points around the best of them.

The space follows the paper's figure 1, with what suits private training beside it: larger rates, SGD beside Adam. The
noise is not searched: it follows from the budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from clipwise.tune.space import Choice, Dimension, Range, point
from experiments.backprop_clipping.sets import DIGITS
from experiments.backprop_clipping.trial import METHODS, Trial
from experiments.harness.rounds import nearby

_RATES = {"adam": Range(1e-3, 3e-2, log=True), "sgd": Range(5e-2, 2.0, log=True)}
_RATES_WITHOUT_NOISE = {"adam": Range(3e-4, 1e-2, log=True), "sgd": Range(1e-2, 0.5, log=True)}


@dataclass(frozen=True)
class Effort:
    """How many trials every method gets, spread and around the best, and how many runs the best of them."""

    spread: int
    near: int
    seeds: int


GREY, COLOUR, QUICK = Effort(6, 3, 10), Effort(4, 1, 8), Effort(1, 1, 2)


@dataclass(frozen=True)
class Row:
    """What is compared: one method, on one data set, at one epsilon."""

    data: str
    method: str
    epsilon: float | None

    @property
    def label(self) -> str:
        """How the row is called among results."""
        return f"{self.data}/{self.method}"


def effort_of(data: str, quick: bool) -> Effort:
    """The same for every method."""
    if quick:
        return QUICK
    return COLOUR if data == "cifar10" else GREY


def space(row: Row) -> dict[str, Dimension]:
    """What may be chosen for a row.

    Batches are 1/32 or 1/16 of the records: 1,875 or 3,750 of 60,000. C2 is on the scale of one example's loss: below
    1e-3 all gradients are clipped, so that smaller ones would change nothing but the scale. Where there is no noise,
    small batches and more epochs cost nothing but time.
    """
    rates: tuple[float, ...] = (1 / 32, 1 / 16)
    epochs: tuple[int, ...] = (4, 8) if row.data == "cifar10" else (5, 12)
    if row.epsilon is None:
        rates, epochs = (1 / 256, 1 / 64), (12, 24)
    if row.data == DIGITS:  # to show that everything works
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


@cache
def spread(row: Row, count: int) -> tuple[Trial, ...]:
    """The first trials."""
    return tuple(_trial(row, _evenly(i, len(space(row)))) for i in range(1, count + 1))


@cache
def near(row: Row, best: int, count: int) -> tuple[Trial, ...]:
    """Trials around the first trial with this number (from 0)."""
    dimensions = len(space(row))
    centre = _evenly(best + 1, dimensions)
    return tuple(_trial(row, nearby(centre, _evenly(100 + i, dimensions))) for i in range(1, count + 1))


def _trial(row: Row, u: list[float]) -> Trial:
    chosen = point(space(row), u)
    pace = chosen.pop("pace")  # each optimizer has rates of its own
    rates = _RATES_WITHOUT_NOISE if row.epsilon is None else _RATES
    return Trial(
        row.data, row.method, row.epsilon, learning_rate=rates[chosen["optimizer"]].at(pace), **chosen
    )


def _evenly(index: int, dimensions: int) -> list[float]:
    """Points that fill a cube, even the first few: 1/2 + index a mod 1, a = (1/p, 1/p^2, ...) with p^(d+1) = p + 1."""
    p = 1.0
    for _ in range(64):
        p = (1 + p) ** (1 / (dimensions + 1))
    return [(0.5 + index / p**k) % 1 for k in range(1, dimensions + 1)]
