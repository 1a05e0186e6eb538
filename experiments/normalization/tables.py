"""The tables of the paper as training runs, in order of importance.

Tables 2 and 5 are run in full. The others have a part of the values and columns and shorter runs; `shortened`
describes this. The methods are the paper's, group norm and the sound kinds of batch norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from experiments.normalization.claims import CLAIMS, Claims
from experiments.normalization.setting import Setting

Changes = Mapping[str, Any]
NOISES = (0.0, 0.01, 0.1, 0.3, 1.0, 2.0, 10.0)


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        name, title: as in the paper.
        over: the quantity of its values: "noise" or "epsilon".
        values: one row for each, in each family.
        families: networks by name.
        methods: columns by name, with the fields that each changes.
        trials: the trials of every method and value; the best on the validation part is run on the test part.
        seeds: the minimum number of test runs of the best trial.
        shortened: what is less than in the paper, and which norms are not run; empty if nothing is.
    """

    name: str
    title: str
    over: str
    values: tuple[float, ...]
    families: Mapping[str, Setting]
    methods: Mapping[str, Changes]
    trials: tuple[Changes, ...]
    seeds: int
    shortened: str = ""
    claims: Claims = field(default_factory=dict)

    def tried(self, family: str, method: str, value: float) -> list[Setting]:
        """The trials of one entry: the same number for each entry, in the same order."""
        setting = self.families[family].but(**self.methods[method]).but(**{self.over: value})
        return [setting.but(**trial) for trial in self.trials]


_NORMS = {"no norm": {"norm": "none"}, "layer norm": {"norm": "layer"}, "group norm": {"norm": "group"}}
_NOISY = _NORMS | {"batch norm": {"norm": "batch"}}
_SOUND = _NORMS | {
    "group norm, hidden layers": {"norm": "group", "placement": "hidden"},
    "public": {"norm": "public"},
    "self+public": {"norm": "self+public"},
    "public-exact": {"norm": "public-exact"},
}
# Statistics of private microbatches in training, which need clipping per microbatch.
_BY_MICROBATCH = {
    "BC, batch norm": {"norm": "batch", "clip": "batch"},
    "BC, batch norm, noised statistics": {"norm": "batch", "clip": "batch", "statistics": "noised"},
}
# Noised statistics that the run released: no public rows.
_RELEASED = {"noised statistics": {"norm": "released"}}
_RATES = tuple({"learning_rate": rate} for rate in (1e-3, 1e-2, 1e-1))
_PRIVATE = Setting(batch_size=2048)

TABLES: tuple[Table, ...] = (
    Table(
        "5",
        "Private training on MNIST, 128 images of KMNIST as public rows",
        over="epsilon",
        values=(7.0, 3.0, 1.0, 0.5, 0.1, 0.05),
        families={"LeNet-5": _PRIVATE},
        methods=_SOUND | _RELEASED,
        trials=(
            *({"epochs": 10, "learning_rate": rate} for rate in (0.7, 2.0, 6.0, 15.0)),
            *({"epochs": 3, "learning_rate": rate} for rate in (2.0, 6.0)),
        ),
        seeds=5,
        claims=CLAIMS["5"],
    ),
    Table(
        "2",
        "Noise on the weights: MNIST, without privacy",
        over="noise",
        values=NOISES,
        families={
            "LeNet-300-100": Setting(model="lenet_300_100", batch_size=1024),
            "LeNet-5": Setting(model="lenet5", batch_size=1024),
        },
        methods=_NOISY,
        trials=_RATES,
        seeds=5,
        claims=CLAIMS["2"],
    ),
    Table(
        "5-microbatches",
        "The same with batch norm over microbatches, whose mean gradients are clipped",
        over="epsilon",
        values=(7.0, 1.0),
        families={"LeNet-5": _PRIVATE},
        methods={name: _NORMS[name] for name in ("no norm", "group norm")} | _BY_MICROBATCH,
        trials=tuple({"epochs": 3, "learning_rate": rate} for rate in (0.7, 2.0, 6.0)),
        seeds=2,
        shortened="2 of 6 budgets, 3 epochs, 3 trials, 2 seeds: every microbatch needs its own passes; "
        "columns not run: layer norm, public, self+public, public-exact",
    ),
    Table(
        "7",
        "Private training on AG News, 128 texts of IMDB as public rows",
        over="epsilon",
        values=(7.0, 1.0, 0.1),
        families={"BiLSTM": Setting(data="ag_news", model="bilstm", trains_words=False, batch_size=512, epochs=15)},
        methods={name: _SOUND[name] for name in ("no norm", "layer norm", "group norm", "public-exact")},
        trials=({"learning_rate": 1.0}, {"learning_rate": 4.0}),
        seeds=2,
        shortened="10,000 of 120,000 texts, random word vectors that stay, 3 of 5 budgets, 2 trials, 2 seeds; "
        "columns not run: public, self+public",
        claims=CLAIMS["7"],
    ),
    Table(
        "4",
        "Noise on the weights: AG News, without privacy",
        over="noise",
        values=(0.0, 0.01, 0.1, 1.0, 2.0),
        families={"BiLSTM": Setting(data="ag_news", model="bilstm", batch_size=256, epochs=15)},
        methods={name: _NOISY[name] for name in ("no norm", "layer norm", "batch norm")},
        trials=({"learning_rate": 2e-3},),
        seeds=2,
        shortened="10,000 of 120,000 texts, 15 of 25 epochs, one learning rate, 2 seeds; columns not run: group norm",
        claims=CLAIMS["4"],
    ),
    Table(
        "6",
        "Private training on CIFAR-10, 128 images of its public tenth as public rows",
        over="epsilon",
        values=(8.0, 2.0),
        families={
            "TF-tutorial, pretrained": Setting(
                data="cifar10", model="tutorial_cnn", pretrained=True, batch_size=1024, epochs=8
            )
        },
        methods={name: _SOUND[name] for name in _SOUND if name != "group norm, hidden layers"},
        trials=({"learning_rate": 0.5}, {"learning_rate": 1.5}),
        seeds=2,
        shortened="convolutions pretrained on the public tenth of CIFAR-10 in place of CIFAR-100, which is not "
        "available here; 2 of 3 budgets, 8 epochs, 2 trials, 2 seeds",
        claims=CLAIMS["6"],
    ),
    Table(
        "6-scratch",
        "The same without pretraining, and the light VGG",
        over="epsilon",
        values=(8.0,),
        families={
            "TF-tutorial": Setting(data="cifar10", model="tutorial_cnn", batch_size=1024, epochs=8),
            "light VGG, a quarter of the width": Setting(
                data="cifar10", model="light_vgg", width=16, batch_size=1024, epochs=8
            ),
        },
        methods={name: _SOUND[name] for name in ("no norm", "group norm", "public-exact")},
        trials=({"learning_rate": 1.0},),
        seeds=2,
        shortened="from scratch, which the paper does not have; one budget, 8 epochs, one learning rate, 2 seeds; "
        "columns not run: layer norm, public, self+public",
    ),
    Table(
        "3",
        "Noise on the weights: CIFAR-10, without privacy",
        over="noise",
        values=(0.0, 0.1, 1.0),
        families={
            "ResNet-18": Setting(data="cifar10", model="resnet18", width=16, batch_size=512, epochs=6),
            "VGG-16": Setting(data="cifar10", model="vgg16", width=16, batch_size=512, epochs=6),
        },
        methods={
            "batch norm, hidden layers": {"norm": "batch", "placement": "hidden"},
            "batch norm, the last removed (mod)": {"norm": "batch", "placement": "mod"},
            "batch norm": {"norm": "batch"},
            "group norm": {"norm": "group"},
        },
        trials=({"learning_rate": 2e-3},),
        seeds=1,
        shortened="a quarter of the width (16 channels at first), 6 epochs, no augmentation, 3 of 5 noises, one "
        "learning rate, 1 seed; columns not run: no norm, layer norm",
        claims=CLAIMS["3"],
    ),
)
QUICK = ("5", "2", "7", "4")  # the tables of a quick run by default
# Figure 1 is drawn from the accuracies after each epoch of these columns.
FIGURE_1 = {"2": "batch norm", "3": "batch norm"}


def quick(table: Table) -> Table:
    """One value, small networks, one epoch, on data that ship with clipwise or are synthetic."""
    small = {
        family: setting.but(
            data="made-up texts" if setting.side == 0 else "digits",
            width=None if setting.width is None else 4,
            batch_size=128,
            epochs=1,
        )
        for family, setting in table.families.items()
    }
    trials = tuple({**trial, "epochs": 1} for trial in table.trials[-2:])
    return replace(table, values=table.values[-2:-1] or table.values, families=small, trials=trials, seeds=1)
