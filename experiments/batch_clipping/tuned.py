"""All strategies at equal epsilon, each with the best of the same number of trials, chosen without the test part.

MNIST and the paper's network for it, Poisson batches, zero-out adjacency for all. A trial is a batch size and a walk:
the standard deviation of the total noise of all updates on a coordinate. With T steps an update has noise
walk / sqrt(T), which sets the learning rate. Strategies and batch sizes compare on that scale, and all get the same
walks. C needs no trials: where nearly everything is clipped, only rate times C matters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from experiments.batch_clipping.setting import Setting
from experiments.harness.store import Cell

NAME = "equal-epsilon"
EPSILONS = (3.0, 1.0, 8.0)  # in the order of the runs
SEEDS = 3
WALKS = (3e-3, 1e-2, 3e-2)
_RECORDS = 54_000  # of the final training; a trial has a tenth less

_COMMON = Setting(
    data="mnist",
    model="bn_lenet5",
    layers="layer",
    max_norm=0.1,
    sigma=None,
    split="optimal",
    sampling="poisson",
    epochs=6,
    momentum=0.9,
    decay=1.0,
    augmented=False,
)
_EXAMPLE = _COMMON.but(clip="example", parts="all", norm="group")
_BATCH = _COMMON.but(clip="batch", parts="all", norm="batch")

# The baselines come first.
METHODS: dict[str, Setting] = {
    "IC, flat, group norm": _EXAMPLE,
    "IC, flat, no norm": _EXAMPLE.but(norm="none"),
    "BC, flat, batch norm": _BATCH,
    "BC, flat, group norm": _BATCH.but(norm="group"),
    "BC, enhanced, batch norm": _BATCH.but(parts="enhanced"),
    "BC, Zhang, batch norm": _BATCH.but(parts="zhang", max_norm=1.0),
    "BC, multipliers (optimal), batch norm": _BATCH.but(parts="multipliers"),
    "BC, multipliers (paper), batch norm": _BATCH.but(parts="multipliers-paper"),
    "BC, 4 groups, batch norm": _BATCH.but(parts="groups"),
    "BC, flat, batch norm, sparse": _BATCH.but(sparse_from=3),
    "IC, enhanced, group norm": _EXAMPLE.but(parts="enhanced"),
    "IC, multipliers (optimal), group norm": _EXAMPLE.but(parts="multipliers"),
    "IC, multipliers (paper), group norm": _EXAMPLE.but(parts="multipliers-paper"),
    "IC, 4 groups, group norm": _EXAMPLE.but(parts="groups"),
    "IC, per layer, group norm": _EXAMPLE.but(parts="layerwise"),
    "IC, flat, group norm, sparse": _EXAMPLE.but(sparse_from=3),
    "IC, flat, group norm, 4 crops": _EXAMPLE.but(augmented=True, flipped=False, views=4),
    "BC, 16 microbatches, batch norm": _BATCH.but(microbatches=16),
    "BC, momentum inside 8 microbatches, group norm": _BATCH.but(microbatches=8, norm="group", local_rate=0.1),
}


def batch_sizes(method: str) -> tuple[int, int]:
    """Small batches for one clipped mean, large ones for clipped examples and for several microbatches."""
    return (128, 1024) if METHODS[method].microbatches == 1 else (512, 1024)


def trials(method: str, epsilon: float) -> list[Setting]:
    """The trials of one method: the same number for each, in the same order."""
    return [
        METHODS[method].but(epsilon=epsilon, batch_size=size, noise_rate=_rate(walk, size))
        for size in batch_sizes(method)
        for walk in WALKS
    ]


def _rate(walk: float, batch_size: int) -> float:
    """walk / sqrt(T), to two digits."""
    return float(f"{walk / math.sqrt(_COMMON.epochs * _RECORDS / batch_size):.2g}")


def chosen(tried: Iterable[Cell]) -> str | None:
    """The key of the setting that did best on the validation part; None if every trial failed.

    Runs may end in any order, so keys break ties.
    """
    found = [(float(cell["accuracy"]), str(cell["setting"])) for cell in tried if "accuracy" in cell]
    return max(found)[1] if found else None
