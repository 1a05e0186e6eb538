"""The figures of the batch-clipping paper as training runs, in the order of the runs.

The settings are the paper's. Figures 4 and 18 and appendix B are run in full. The others are run for a part of the
values and fewer epochs, and are labelled as shortened. Each figure about private training also has rows that the paper
does not have: flat per-example clipping of a network with group norm, at equal privacy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from experiments.batch_clipping.setting import Setting

_TENSORS = 62  # of ResNet-18: the paper's number of layers, L
_PLAIN_TENSORS = 22  # of ResNet-18 without norms
_LAYERS = 8  # of BN-LeNet-5
_CONVNET_LAYERS, _PLAIN_CONVNET_LAYERS = 9, 5  # with norms and without
_SHORT = 10  # epochs of a figure that is not run in full


@dataclass(frozen=True)
class Row:
    """One line of a table: a setting, its label, and the paper's result."""

    label: str
    setting: Setting
    paper: str = ""
    epochs_in_paper: int | None = None


@dataclass(frozen=True)
class Figure:
    """A figure and its rows."""

    name: str
    title: str
    rows: tuple[Row, ...]


def _short(row: Row) -> Row:
    """The row with fewer epochs than in the paper."""
    return replace(
        row, setting=row.setting.but(epochs=min(_SHORT, row.setting.epochs)), epochs_in_paper=row.setting.epochs
    )


def _figure(name: str, title: str, *rows: Row, full: bool = False) -> Figure:
    return Figure(name, title, rows if full else tuple(map(_short, rows)))


def _against_flat(setting: Setting, parts: int) -> tuple[Row, ...]:
    """Flat per-example clipping and group norm, with the joint multiplier of a layerwise setting.

    Once at the paper's rate, and once at B times that rate, where the noise of an update is that of batch clipping.
    """
    assert setting.sigma is not None
    flat = setting.but(
        clip="example",
        parts="all",
        norm="group",
        sigma=setting.sigma / math.sqrt(parts),
        norm_decay=1.0,
        microbatches=1,
    )
    faster = flat.but(learning_rate=flat.learning_rate * flat.batch_size)
    return (
        Row("IC, flat, group norm, equal privacy", flat),
        Row("IC, flat, group norm, equal privacy, rate times m", faster),
    )


RESNET = Setting()  # C = 0.095, sigma = 0.01875, m = 64, rate 0.025 with decay 0.9, 50 epochs
SMALL_C = RESNET.but(max_norm=0.0095)
CONVNET = Setting(model="convnet", layers="layer", max_norm=0.14, sigma=0.5)
LENET = Setting(data="mnist", model="bn_lenet5", layers="layer", max_norm=0.2, sigma=0.5)
_OPEN = {"clip": "none", "parts": "all", "sigma": None}
_IC_SMALL = SMALL_C.but(clip="example", norm="group")


def _schedules(setting: Setting, what: str, paper: str) -> tuple[Row, ...]:
    """Constant and diminishing step size, constant and diminishing C."""
    words = {1.0: "constant", 0.9: "diminishing"}
    return tuple(
        Row(f"{what}, {words[decay]} rate, {words[shrink]} C", setting.but(decay=decay, norm_decay=shrink), paper)
        for decay in words
        for shrink in words
    )


FIGURES: tuple[Figure, ...] = (
    _figure(
        "4",
        "Enhanced and Zhang's adaptive clipping, batch (BC) and individual (IC) clipping: ResNet-18, CIFAR-10",
        Row("BC, enhanced, C = 0.0095", SMALL_C, "67% (text of figure 3); converges"),
        Row("BC, enhanced, C = 0.095", RESNET, "66.66% (figure 18)"),
        Row("BC, Zhang", SMALL_C.but(parts="zhang", max_norm=1.0), "below enhanced"),
        Row("IC, enhanced, group norm", _IC_SMALL, "does not converge (with batch norm)"),
        Row("IC, enhanced, no norm", _IC_SMALL.but(norm="none"), "18% to 22% (figure 17, C = 0.095)"),
        *_against_flat(SMALL_C, _TENSORS),
        full=True,
    ),
    _figure(
        "18",
        "Adaptive layerwise (ALC) and full-gradient clipping (FGC) under BC: ResNet-18, CIFAR-10",
        Row("ALC", RESNET, "66.66%"),
        Row("FGC, equal noise", RESNET.but(parts="all"), "46.35%"),
        Row("FGC, equal privacy", RESNET.but(parts="all", sigma=0.01875 / math.sqrt(_TENSORS)), "below ALC"),
        Row("4 groups, equal privacy", RESNET.but(parts="groups", sigma=0.01875 * math.sqrt(4 / _TENSORS))),
        *(
            Row(f"multipliers ({kind}), equal privacy", RESNET.but(parts=parts, sigma=0.01875 / math.sqrt(_TENSORS)))
            for kind, parts in (("paper", "multipliers-paper"), ("optimal", "multipliers"))
        ),
        *_against_flat(RESNET, _TENSORS),
        full=True,
    ),
    _figure(
        "B",
        "Appendix B: BN-LeNet-5, MNIST, C = 0.2, m = 64",
        Row("ALC, sigma 2.5", LENET.but(sigma=2.5), "50.38%, said to be 0.52-GDP"),
        Row("ALC, sigma 1.5", LENET.but(sigma=1.5), "67%, said to be 1.99-GDP"),
        Row("ALC, sigma 0.5", LENET.but(sigma=0.5), "84.80%, no guarantee stated"),
        Row("FGC, privacy of sigma 2.5", LENET.but(parts="all", sigma=2.5 / math.sqrt(_LAYERS))),
        Row("4 groups, privacy of sigma 2.5", LENET.but(parts="groups", sigma=2.5 * math.sqrt(4 / _LAYERS))),
        Row(
            "multipliers (paper), privacy of sigma 2.5",
            LENET.but(parts="multipliers-paper", sigma=2.5 / math.sqrt(_LAYERS)),
        ),
        Row(
            "multipliers (optimal), privacy of sigma 2.5",
            LENET.but(parts="multipliers", sigma=2.5 / math.sqrt(_LAYERS)),
        ),
        Row("one random layer, privacy of sigma 2.5", LENET.but(parts="random-layer", sigma=2.5 / math.sqrt(_LAYERS))),
        Row(
            "FGC, sparse from half of the epochs, privacy of sigma 2.5",
            LENET.but(parts="all", sigma=2.5 / math.sqrt(_LAYERS), sparse_from=25),
        ),
        *_against_flat(LENET.but(sigma=2.5), _LAYERS),
        full=True,
    ),
    _figure(
        "12",
        "Noise and batch size: BN-LeNet-5, MNIST, C = 0.2",
        *(Row(f"sigma {s:g}, m = 64", LENET.but(sigma=s)) for s in (0.5, 1.0, 2.0)),
        Row("sigma 2.5, m = 64", LENET.but(sigma=2.5), "50.38%"),
        Row("sigma 2.5, m = 256", LENET.but(sigma=2.5, batch_size=256)),
        Row("sigma 2.5, m = 1024", LENET.but(sigma=2.5, batch_size=1024), "45.11%"),
        *_against_flat(LENET.but(sigma=2.5, batch_size=1024), _LAYERS),
    ),
    _figure(
        "11",
        "Master clipping constant: BN-LeNet-5, MNIST, sigma 0.5, m = 64",
        *(Row(f"C = {C:g}", LENET.but(max_norm=C), "84.80%, the best" if C == 0.2 else "") for C in (0.05, 0.2, 0.8)),
        *_against_flat(LENET, _LAYERS),
    ),
    _figure(
        "3",
        "Batch size: ResNet-18, CIFAR-10, BC with enhanced ALC, C = 0.0095",
        Row("m = 64", SMALL_C, "67%"),
        Row("m = 1024", SMALL_C.but(batch_size=1024)),
        *_against_flat(SMALL_C, _TENSORS),
    ),
    _figure(
        "5",
        "Noise: ResNet-18, CIFAR-10, C = 0.095, m = 64, 10 epochs",
        *(
            Row(f"sigma {s:g}", RESNET.but(sigma=s, epochs=10), paper)
            for s, paper in ((0.01875, ""), (0.2, "below 40%"), (0.5, "about 20%"))
        ),
        *_against_flat(RESNET.but(sigma=0.5, epochs=10), _TENSORS),
    ),
    _figure(
        "2",
        "Without privacy: ResNet-18, CIFAR-10",
        Row("m = 64", RESNET.but(**_OPEN), "90.24%"),
        Row("m = 1024", RESNET.but(batch_size=1024, **_OPEN)),
    ),
    _figure(
        "1",
        "Norms of layers over training: ResNet-18, CIFAR-10, without privacy",
        Row("m = 64", RESNET.but(watches_norms=True, **_OPEN), "most fall slowly"),
    ),
    _figure(
        "6",
        "Master clipping constant: convnet, CIFAR-10, sigma 0.01875, m = 1024",
        *(
            Row(f"C = {C:g}", CONVNET.but(max_norm=C, sigma=0.01875, batch_size=1024), paper)
            for C, paper in ((0.1, ""), (0.9, "59.02%, the best"))
        ),
        *_against_flat(CONVNET.but(max_norm=0.9, sigma=0.01875, batch_size=1024), _CONVNET_LAYERS),
    ),
    _figure(
        "7",
        "Master clipping constant: convnet, CIFAR-10, sigma 0.5, m = 1024",
        *(
            Row(f"C = {C:g}", CONVNET.but(max_norm=C, batch_size=1024), paper)
            for C, paper in ((0.1, "40.58%, the best"), (0.9, "lower"))
        ),
        *_against_flat(CONVNET.but(max_norm=0.1, batch_size=1024), _CONVNET_LAYERS),
    ),
    _figure(
        "8",
        "Without privacy: convnet, CIFAR-10",
        Row("m = 64", CONVNET.but(**_OPEN), "80.55%"),
        Row("m = 1024", CONVNET.but(batch_size=1024, **_OPEN), "61.19%"),
    ),
    _figure(
        "9",
        "Master clipping constant and noise: convnet, CIFAR-10, m = 64",
        *(
            Row(f"C = {C:g}, sigma {s:g}", CONVNET.but(max_norm=C, sigma=s), paper)
            for C, s, paper in (
                (0.14, 0.5, "43.42%"),
                (0.5, 0.5, ""),
                (0.14, 0.01, ""),
                (0.14, 0.2, "15% below sigma 0.01"),
            )
        ),
        *_against_flat(CONVNET, _CONVNET_LAYERS),
    ),
    _figure(
        "10",
        "Batch size: convnet, CIFAR-10, C = 0.14, sigma 0.5",
        Row("m = 64", CONVNET, "about 40%"),
        Row("m = 1024", CONVNET.but(batch_size=1024)),
        *_against_flat(CONVNET, _CONVNET_LAYERS),
    ),
    _figure(
        "13",
        "Without privacy, with and without batch norm: convnet, CIFAR-10",
        Row("batch norm", CONVNET.but(**_OPEN), "80.55% (figure 8)"),
        Row("no norm", CONVNET.but(norm="none", **_OPEN), "lower"),
        Row("group norm", CONVNET.but(norm="group", **_OPEN)),
    ),
    _figure(
        "14",
        "With and without batch norm: convnet, CIFAR-10, C = 0.14, sigma 0.5, m = 64",
        Row("BC, batch norm", CONVNET, "about 5 points above no norm"),
        Row("BC, no norm", CONVNET.but(norm="none")),
        Row("BC, group norm", CONVNET.but(norm="group")),
        *_against_flat(CONVNET, _CONVNET_LAYERS),
    ),
    _figure(
        "15",
        "IC with ALC: convnet without norm, CIFAR-10, C = 0.095, sigma 0.01875, m = 64",
        *_schedules(CONVNET.but(clip="example", norm="none", max_norm=0.095, sigma=0.01875), "IC", "at most 21.12%"),
        *_against_flat(CONVNET.but(max_norm=0.095, sigma=0.01875), _PLAIN_CONVNET_LAYERS),
    ),
    _figure(
        "16",
        "BC with ALC: ResNet-18 without norm, CIFAR-10, C = 0.095, sigma 0.01875, m = 64",
        *_schedules(RESNET.but(norm="none"), "BC", "30% to 40%"),
        *_against_flat(RESNET, _PLAIN_TENSORS),
    ),
    _figure(
        "17",
        "IC with ALC: ResNet-18 without norm, CIFAR-10, C = 0.095, sigma 0.01875, m = 64",
        *_schedules(RESNET.but(clip="example", norm="none"), "IC", "18% to 22%"),
        *_against_flat(RESNET, _PLAIN_TENSORS),
    ),
)
