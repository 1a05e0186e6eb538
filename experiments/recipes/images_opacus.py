"""Opacus's MNIST example, trained by Opacus itself, and the defaults of `clipwise train` at the same epsilon."""

from __future__ import annotations

import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import opacus
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from clipwise import accounting
from clipwise.recipes.images.source import ImageSource
from clipwise.recipes.kind import Settings
from experiments.data.images import images
from experiments.recipes.images import DIGITS, sample_network
from experiments.recipes.media import DELTA, Results, Row, accuracy, run

MEAN, STD = 0.1307, 0.3081  # with which the example scales pixels


@dataclass(frozen=True)
class Example:
    """Published settings of the example: SGD without momentum and Poisson batches."""

    name: str
    batch_size: int
    epochs: int
    learning_rate: float
    noise_multiplier: float
    max_norm: float


# The settings that its page gives for epsilon 1.19 (a bound by RDP), and the defaults of its script.
EXAMPLES = (
    Example("Opacus, its settings for epsilon 1.19", 240, 15, 0.25, 1.3, 1.5),
    Example("Opacus, the defaults of its script", 64, 10, 0.1, 1.0, 1.0),
)


def compare(data: Path, seeds: int, command: str) -> None:
    """Train each example with Opacus, and the defaults of clipwise at the epsilon that PLD gives for it."""
    results = Results("images-opacus", command)
    for example in EXAMPLES:
        settings = Settings(
            example.name,
            example.batch_size,
            example.epochs,
            example.learning_rate,
            momentum=0.0,
            max_norm=example.max_norm,
        )
        for seed in range(seeds):
            if not results.has(settings, seed=seed):
                results.add(trained_by_opacus(example, settings, data, seed))
            epsilon = next(row["epsilon"] for row in results.rows if row["settings"] == asdict(settings))
            training = ImageSource(data / "mnist", labels=DIGITS)
            defaults = training.defaults(len(training), epsilon, "fast")
            if not results.has(defaults, seed=seed, epsilon=epsilon):
                encoder = training.prepare(np.arange(len(training)), None)
                train, test = encoder.encode(training), encoder.encode(encoder.open(data / "mnist"))
                results.add({"data": "mnist"} | run(encoder, defaults, train, test, epsilon, seed=seed))


def trained_by_opacus(example: Example, settings: Settings, folder: Path, seed: int) -> Row:
    """The accuracy of one run of the example. The seed is for the initial weights, the noise and the batches."""
    train, test = pixels(folder)
    torch.manual_seed(seed)
    network = sample_network()
    engine = opacus.PrivacyEngine()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about its generator and its hooks
        model, optimizer, loader = engine.make_private(
            module=network,
            optimizer=torch.optim.SGD(network.parameters(), example.learning_rate),
            data_loader=DataLoader(train, batch_size=example.batch_size),
            noise_multiplier=example.noise_multiplier,
            max_grad_norm=example.max_norm,
        )
        begin = time.perf_counter()
        for _ in range(example.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        seconds = time.perf_counter() - begin
    rate, steps = 1 / len(loader), example.epochs * len(loader)
    figures = {"noise_multiplier": example.noise_multiplier, "sample_rate": rate, "steps": steps, "delta": DELTA}
    return {
        "data": "mnist",
        "epsilon": accounting.epsilon(**figures),
        "epsilon_by_opacus": float(engine.get_epsilon(DELTA)),
        "seed": seed,
        "rows": len(train),
        "steps": steps,
        "noise_multiplier": example.noise_multiplier,
        "seconds": round(seconds, 1),
        "accuracy": accuracy(_plain(model), test),
        "settings": asdict(settings),
    }


def pixels(folder: Path) -> tuple[TensorDataset, TensorDataset]:
    """The training and the test part, scaled as in the example."""
    parts = (images("mnist", train=train, folder=folder).tensors for train in (True, False))
    train, test = (TensorDataset((x - MEAN) / STD, y) for x, y in parts)
    return train, test


def _plain(model: nn.Module) -> nn.Module:
    found: nn.Module = model._module
    return found
