"""All strategies at equal epsilon, each with the best of the same trials, chosen without the test part.

MNIST and the paper's network for it, Poisson batches, a record left out (zero-out): one adjacency for all. A trial is a
batch size and a noise rate, the standard deviation of the noise of an update on a coordinate. On that scale the
rates of strategies compare, and all get the same trials. C needs none of its own: where nearly everything is clipped,
only rate times C matters.
"""

from __future__ import annotations

from collections.abc import Iterable

from clipwise.reproduce.setting import Setting
from clipwise.reproduce.store import Cell

NAME = "equal-epsilon"
EPSILONS = (1.0, 3.0, 8.0)
SEEDS = 3
NOISE_RATES = (5e-5, 1.5e-4, 4e-4, 1.2e-3)
BATCH_SIZES = (128, 1024)

_COMMON = Setting(
    data="mnist",
    model="bn_lenet5",
    layers="layer",
    max_norm=0.1,
    sigma=None,
    split="optimal",
    sampling="poisson",
    epochs=10,
    momentum=0.9,
    decay=1.0,
    augmented=False,
)
_EXAMPLE = _COMMON.but(clip="example", parts="all", norm="group")
_BATCH = _COMMON.but(clip="batch", parts="all", norm="batch")

METHODS: dict[str, Setting] = {
    "IC, flat, group norm": _EXAMPLE,
    "IC, flat, no norm": _EXAMPLE.but(norm="none"),
    "IC, flat, group norm, 4 views": _EXAMPLE.but(augmented=True, views=4),
    "IC, by layer, group norm": _EXAMPLE.but(parts="layerwise"),
    "IC, enhanced, group norm": _EXAMPLE.but(parts="enhanced"),
    "IC, 4 groups, group norm": _EXAMPLE.but(parts="groups"),
    "IC, multipliers (optimal), group norm": _EXAMPLE.but(parts="multipliers"),
    "IC, multipliers (paper), group norm": _EXAMPLE.but(parts="multipliers-paper"),
    "BC, flat, batch norm": _BATCH,
    "BC, flat, group norm": _BATCH.but(norm="group"),
    "BC, flat, batch norm, 16 mini-sets": _BATCH.but(mini_sets=16),
    "BC, momentum inside 16 mini-sets, group norm": _BATCH.but(mini_sets=16, norm="group", local_rate=0.1),
    "BC, enhanced, batch norm": _BATCH.but(parts="enhanced"),
    "BC, Zhang, batch norm": _BATCH.but(parts="zhang", max_norm=1.0),
    "BC, 4 groups, batch norm": _BATCH.but(parts="groups"),
    "BC, multipliers (optimal), batch norm": _BATCH.but(parts="multipliers"),
    "BC, multipliers (paper), batch norm": _BATCH.but(parts="multipliers-paper"),
}


def trials(method: str, epsilon: float) -> list[Setting]:
    """What is tried for one method: as many trials for each, in the same order."""
    return [
        METHODS[method].but(epsilon=epsilon, batch_size=size, noise_rate=rate)
        for size in BATCH_SIZES
        for rate in NOISE_RATES
    ]


def chosen(tried: Iterable[Cell]) -> str | None:
    """The key of the setting that did best on the validation part; None where no trial came through.

    Runs may end in any order, so a tie is broken by the keys.
    """
    found = [(float(cell["accuracy"]), str(cell["setting"])) for cell in tried if "accuracy" in cell]
    return max(found)[1] if found else None
