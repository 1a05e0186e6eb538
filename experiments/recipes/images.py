"""The defaults of `clipwise train` for images: the search that chose them, and accuracies on other data sets.

    python -m experiments recipes/images --data DIR --search     # on KMNIST and CIFAR-10
    python -m experiments recipes/images --data DIR --judge      # on MNIST and Fashion-MNIST

Both write `results/images-*.json` beside this file, and `results/images.md` from what is there.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from clipwise.recipes.images import ImageEncoder, ImageSource
from clipwise.recipes.kind import Settings
from experiments.data.images import images
from experiments.harness.command import parser_of
from experiments.recipes import images_page
from experiments.recipes.media import Results, part, run

DIGITS = tuple(map(str, range(10)))
VALIDATION_EVERY = 5
BUDGETS = (1.0, 3.0, 8.0)


@dataclass(frozen=True)
class Point:
    """A data set, how many of its images are trained on, and the number of images whose noise they are trained with."""

    data: str
    rows: int
    as_if: int | None
    learning_rates: tuple[float, ...]
    shape: tuple[float, int]  # sampling rate and steps


POINTS = (
    Point("kmnist", 1000, None, (1 / 32, 1 / 16, 1 / 8, 1 / 4), (1 / 8, 200)),
    Point("kmnist", 8000, None, (1 / 8, 1 / 4, 1 / 2), (1 / 8, 200)),
    Point("kmnist", 8000, 60_000, (1 / 2, 1, 2, 4), (1 / 16, 300)),
    Point("cifar10", 4000, 50_000, (1 / 2, 1, 2), (1 / 16, 300)),
)
COMMAND = "python -m experiments recipes/images --data DIR"


def search(data: Path) -> None:
    """Train on a part of KMNIST and CIFAR-10 over a grid, and compare on images that were not trained on."""
    results = Results("images-search", f"{COMMAND} --search")
    for point in POINTS:
        encoder, train, validation = _public(point.data, data, point.rows)
        for settings, epsilon in _grid(point):
            facts = {"data": point.data, "as_if": point.as_if, "epsilon": epsilon}
            if not results.has(settings, **facts):
                results.add(facts | run(encoder, settings, train, validation, epsilon, as_if=point.as_if))


def _grid(point: Point) -> Iterator[tuple[Settings, float]]:
    for epsilon in BUDGETS:
        for learning_rate in point.learning_rates:
            rate, steps = point.shape
            yield Settings("scattering", round(point.rows * rate), steps * rate, learning_rate), epsilon


def _public(name: str, data: Path, rows: int) -> tuple[ImageEncoder, TensorDataset, TensorDataset]:
    """The encoder, the first `rows` images that are not every fifth, and every fifth."""
    x, y = images(name, train=name != "kmnist", folder=data).tensors
    x, y = x[:10_000], y[:10_000]
    encoder = ImageEncoder(DIGITS, x.shape[1], x.shape[2])
    encoded = TensorDataset(encoder._encoded(x), y)
    is_validation = np.arange(len(y)) % VALIDATION_EVERY == 0
    training_rows = np.flatnonzero(~is_validation)[:rows].tolist()
    return encoder, part(encoded, training_rows), part(encoded, np.flatnonzero(is_validation).tolist())


def judge(data: Path, names: Sequence[str], seeds: int) -> None:
    """Train with the defaults on MNIST and Fashion-MNIST, which did not choose them. Test on their test parts."""
    results = Results("images-judgement", f"{COMMAND} --judge --seeds {seeds}")
    for name in names:
        training = ImageSource(data / name, labels=DIGITS)
        encoder = training.prepare(np.arange(len(training)), None)
        train, test = encoder.encode(training), encoder.encode(encoder.open(data / name))
        for epsilon in BUDGETS:
            settings = training.defaults(len(train), epsilon, "fast")
            for seed in range(seeds):
                if not results.has(settings, data=name, epsilon=epsilon, seed=seed):
                    results.add({"data": name} | run(encoder, settings, train, test, epsilon, seed=seed))


def baseline(data: Path, names: Sequence[str]) -> None:
    """Opacus's MNIST example: its network and settings, trained by clipwise, at the epsilon that they cost."""
    results = Results("images-baseline", f"{COMMAND} --baseline")
    for name in names:
        encoder = ImageEncoder(DIGITS, 1, 28).for_model("tanh-cnn")
        training = ImageSource(data / name, labels=DIGITS)
        train, test = encoder.encode(training), encoder.encode(encoder.open(data / name))
        settings = Settings("Opacus's sample network", 64, 10, 0.1, momentum=0.0)
        for epsilon in (1.0, 3.0):
            if not results.has(settings, data=name, epsilon=epsilon):
                results.add({"data": name} | run(encoder, settings, train, test, epsilon, model=sample_network))


def sample_network() -> nn.Module:
    """The network of Opacus's MNIST example: two convolutions and two linear layers with ReLU."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def main(arguments: Sequence[str]) -> None:
    """The command line."""
    parser = parser_of("python -m experiments recipes/images", __doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of data sets")
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--judge", action="store_true")
    parser.add_argument("--baseline", action="store_true", help="settings of Opacus's MNIST example at epsilon 1 and 3")
    parser.add_argument("--opacus", action="store_true", help="Opacus's MNIST example, trained by Opacus")
    parser.add_argument("--set", dest="sets", action="append", help="of --judge and --baseline; both if left out")
    parser.add_argument("--seeds", type=int, default=3, help="of --judge and --opacus")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    _run(options)


def _run(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    sets = options.sets or ["mnist", "fashion_mnist"]
    if options.search:
        search(options.data)
    if options.judge:
        judge(options.data, sets, options.seeds)
    if options.baseline:
        baseline(options.data, sets[:1])
    if options.opacus:
        from experiments.recipes.images_opacus import compare  # it imports this module

        compare(options.data, options.seeds, f"{COMMAND} --opacus --seeds {options.seeds}")
    images_page.write()
