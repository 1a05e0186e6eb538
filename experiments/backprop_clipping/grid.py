"""The runs of the paper's table and figures, in order of importance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from experiments.backprop_clipping.claims import CLAIMS
from experiments.backprop_clipping.search import SEARCH, Row, effort_of
from experiments.backprop_clipping.sets import DIGITS
from experiments.backprop_clipping.signal import Signal
from experiments.backprop_clipping.trial import BACKPROP, DP_SGD, OPEN
from experiments.backprop_clipping.withdrawn import KINDS, Withdrawn
from experiments.harness.search import Asked
from experiments.harness.store import Cell

FIGURES = ("table-1", "5", "withdrawn", "signal")
# Figure 5 includes those of table 1, so that they share runs.
EPSILONS: dict[str, tuple[float, ...]] = {
    "mnist": (0.05, 0.07, 0.3, 1.0, 2.93, 8.0),
    "fashion_mnist": (0.05, 0.3, 0.87, 2.7, 8.0),
    "cifar10": (1.0, 3.64, 7.53),
    DIGITS: (8.0,),
}
# Runs on colour images are long: only the paper's form, those that are best on grey images, and flat clipping.
_OF_COLOUR = (
    "dp-sgd-tanh",
    "dp-sgd-relu",
    "dp-sgd-norm",
    "upstream-clip",
    "gradient-clip",
    "gradient-clip-norm",
    "gradient-normalize",
)
SIGNAL_DATA, SIGNAL_EPSILON = "mnist", 1.0
SIGNALS = ("upstream-clip", "gradient-normalize", "dp-sgd-layer", "dp-sgd-relu")  # the paper's form is the first
_QUICK_METHODS = ("dp-sgd-tanh", "upstream-clip", "gradient-normalize")
WITHDRAWN_SEEDS = 3


def asked(figures: Sequence[str], quick: bool, seeds: int, found: Mapping[str, Cell]) -> Iterator[Asked]:
    """The runs that can start now, from the finished ones by key: the quickest data set first.

    No figures means all. `seeds` is the minimum number of test runs of a row.
    """
    for data in sets(quick):
        for figure in figures or FIGURES:
            if figure in ("table-1", "5"):
                for row in rows(figure, data):
                    runs = max(seeds, effort_of(row, quick).seeds)
                    yield from SEARCH.chosen_and_tested(row, figure, quick, found, runs)
            elif figure == "withdrawn":
                yield from _withdrawn(data, quick, seeds)
            elif data in (SIGNAL_DATA, DIGITS):
                yield from _signal(quick, found)


def sets(quick: bool) -> tuple[str, ...]:
    """The data sets, the quickest first."""
    return (DIGITS,) if quick else tuple(CLAIMS)


def epsilons(figure: str, data: str) -> tuple[float, ...]:
    """The epsilons of a data set: in table 1 those of the paper's method and of DP-SGD."""
    if figure == "5" or data == DIGITS:
        return EPSILONS[data]
    return CLAIMS[data].epsilon, CLAIMS[data].baseline_epsilon


def private_methods(data: str) -> tuple[str, ...]:
    """The methods compared on a data set."""
    if data == DIGITS:
        return _QUICK_METHODS
    return _OF_COLOUR if data == "cifar10" else (*DP_SGD, *BACKPROP)


def rows(figure: str, data: str) -> list[Row]:
    """The rows of the table or of figure 5 for one data set."""
    private = [Row(data, m, e) for e in epsilons(figure, data) for m in private_methods(data)]
    return [*(Row(data, method, None) for method in OPEN), *private]


def _withdrawn(data: str, quick: bool, seeds: int) -> Iterator[Asked]:
    for kind in KINDS:
        for seed in range(1 if quick or data == "cifar10" else max(seeds, WITHDRAWN_SEEDS)):
            yield Asked(Withdrawn(data, kind), seed, "test", "withdrawn", f"{data}/{kind}")


def signal_rows(quick: bool) -> dict[str, Row]:
    """For each measured method the row that chooses its setting. Per-layer clipping uses that of flat clipping."""
    data, epsilon = (DIGITS, EPSILONS[DIGITS][0]) if quick else (SIGNAL_DATA, SIGNAL_EPSILON)
    return {m: Row(data, "dp-sgd-relu" if m == "dp-sgd-layer" else m, epsilon) for m in SIGNALS}


def _signal(quick: bool, found: Mapping[str, Cell]) -> Iterator[Asked]:
    for method, row in signal_rows(quick).items():
        yield from SEARCH.trials(row, "signal", quick, found)
        chosen = SEARCH.best(row, quick, found)
        if chosen is not None:
            job = Signal(chosen.but(method=method))
            yield Asked(job, 0, "validation", "signal", method, row.epsilon)
