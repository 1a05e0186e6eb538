"""Every combination of sampling, adjacency, unit and clipping: the rows of the table in
docs/concepts/combinations.md, and the smallest run of each.

The model has one weight, and the gradient of a record is the record itself. So a release is one number.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise import (
    Backprop,
    Batch,
    ConfigurationError,
    Lipschitz,
    NoisedStatistics,
    PerExample,
    Private,
    Quantile,
    layers,
    make_private,
)
from clipwise.contrib import Adaptive, ByNorm, Multipliers, NormDecay, RandomLayer, ReleasedNorms, Sparse

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "combinations.md"
STRATEGIES = ("PerExample", "Lipschitz", "Backprop", "Batch", "Batch(microbatches=N)")


class Combination(NamedTuple):
    """A combination in the table's names."""

    sampling: str
    adjacency: str
    unit: str
    clipping: str


class Row(NamedTuple):
    """The table's entries for a combination."""

    sensitivity: str
    event: str


@dataclass(frozen=True)
class Size:
    """The size of a run: its units, and the arguments of `make_private` that set the batch size."""

    units: int = 6
    options: Mapping[str, Any] | None = None  # by default two units, or all of them
    microbatches: int = 2  # of "Batch" where a unit is a record; and how many records a user has


def documented() -> dict[Combination, Row]:
    """The rows of the table. A cell may name several, each in backquotes."""
    found = {}
    for cells in _table("| `sampling=` | neighbours | unit | clipping |"):
        names = [re.findall(r"`([^`]+)`", cell) for cell in cells[:4]]
        for one in _products(names):
            assert one not in found, f"{one} has two rows"
            found[one] = Row(cells[4], cells[5])
    return found


def documented_options() -> dict[str, dict[str, bool]]:
    """Return for each option the strategies that accept it."""
    header = ["PerExample", "Batch", "Lipschitz", "Backprop"]
    found = {}
    for cells in _table("| option | " + " | ".join(f"`{name}`" for name in header)):
        assert set(cells[1:5]) <= {"yes", "no"}
        found[cells[0].strip("`")] = dict(zip(header, (c == "yes" for c in cells[1:5]), strict=True))
    return found


def _table(beginning: str) -> Iterator[list[str]]:
    lines = iter(PAGE.read_text().splitlines())
    assert any(line.startswith(beginning) for line in lines), f"{PAGE.name} has no table {beginning}"
    next(lines)
    for line in lines:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def _products(names: list[list[str]]) -> list[Combination]:
    found: list[list[str]] = [[]]
    for choices in names:
        found = [[*one, choice] for one in found for choice in choices]
    return [Combination(*one) for one in found]


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "max_norm=Quantile(...)": lambda: {"max_norm": Quantile(count_noise=1.0)},
    "max_norm=NormDecay(...)": lambda: {"max_norm": NormDecay(1.0, 0.5)},
    "parts='tensor'": lambda: {"parts": "tensor"},
    "parts=Adaptive(...)": lambda: {"parts": Adaptive(ReleasedNorms())},
    "parts=Multipliers(...)": lambda: {"parts": Multipliers(ReleasedNorms())},
    "parts=ByNorm(...)": lambda: {"parts": ByNorm(ReleasedNorms(), groups=1, every=2)},
    "parts=RandomLayer(...)": lambda: {"parts": RandomLayer()},
    "mode='normalize'": lambda: {"mode": "normalize"},
    "sparse=Sparse(...)": lambda: {"sparse": Sparse(every=50)},
    "running_statistics=NoisedStatistics(...)": lambda: {"running_statistics": NoisedStatistics()},
    "local_update=...": lambda: {"local_update": lambda model, microbatch: None},
    "augmentation_multiplicity=K": lambda: {},
}


def small(combination: Combination, size: Size | None = None, option: str = "", z: float = 1.0) -> Private:
    """Return a run of a combination, or raise the error of `make_private`."""
    sampling, adjacency, unit, clipping = combination
    size = Size() if size is None else size
    every = clipping == "Batch(microbatches=N)"
    given: dict[str, Any] = {} if sampling == "full" else {"batch_size": size.units if every else 2}
    given = given if size.options is None else dict(size.options)
    records = size.units if unit == "record" else size.units * size.microbatches
    if option == "augmentation_multiplicity=K":
        given["augmentation_multiplicity"] = 2
    strategy, model = _strategy(clipping, option, size, unit)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # several runs, delta and so few records
        return make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            TensorDataset(torch.ones(records, 1)),
            clipping=strategy,
            group=[i % size.units for i in range(records)] if unit == "user" else None,
            sampling=sampling,
            adjacency=adjacency,
            noise_multiplier=z,
            **given,
        )


def _strategy(clipping: str, option: str, size: Size, unit: str) -> tuple[Any, nn.Module]:
    """A strategy with max_norm=1, and a model for it."""
    options = OPTIONS[option]() if option else {}
    model: nn.Module = nn.Linear(1, 1, bias=False)
    if clipping == "Batch(microbatches=N)":
        options["microbatches"] = size.units
    elif clipping == "Batch" and unit == "record":
        options["microbatches"] = size.microbatches
    try:
        if clipping == "Lipschitz":
            return Lipschitz(1.0, 1.0, **options), nn.Sequential(layers.ClipInput(1.0), model)
        if clipping == "Backprop":
            mode = options.get("mode", "clip")
            return Backprop(**options), layers.clip_inputs(model, input_norm=1.0, grad_norm=1.0, mode=mode)
        strategy = PerExample(**options) if clipping == "PerExample" else Batch(**options)
    except TypeError as error:  # it has no such argument
        raise ConfigurationError(str(error)) from error
    if "running_statistics" in options:
        put = layers.with_released_statistics if clipping == "PerExample" else layers.without_running_statistics
        model = put(nn.Sequential(model, nn.BatchNorm1d(1)))
    return strategy, model


def losses(model: nn.Module, x: Tensor) -> Tensor:
    """For a model that is one layer without bias: the gradient of each loss is its row."""
    return F.linear(x, next(model.parameters())).squeeze(1)


def bound_of(combination: Combination) -> float:
    """Return C, the largest norm of one clipped vector."""
    if combination.clipping not in ("Lipschitz", "Backprop"):
        return 1.0
    alone = combination._replace(sampling="full", adjacency="zero-out")
    return small(alone).parts()[0].sensitivity
