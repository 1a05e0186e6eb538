"""One private run on a table, as `clipwise train` makes it: noised counts, then private steps, one joint budget."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from clipwise import accounting, make_private
from clipwise.clipping import PerExample
from clipwise.noise.key import NoiseKey
from clipwise.privacy import Adjacency, Entry, Event, Sampling, Unit
from clipwise.recipes.counts import NoisedCounts, noise_multiplier_for
from clipwise.recipes.kind import Settings
from clipwise.recipes.tables import TableEncoder, TableSource

DELTA = 1e-5
STRING_DELTA = 1e-9
HELD_OUT_EVERY = 10

# The tables that defaults are chosen on, and those they are judged on: file and target.
CHOSEN_ON = {
    "nursery": ("nursery", "class"),
    "students": ("students_dropout", "Target"),
    "german": ("german_credit", "class"),
    "naticusdroid": ("naticusdroid_train", "Result"),
}
JUDGED_ON = {
    "adult": ("adult_train", "income"),
    "breast-cancer": ("breast_cancer", "benign"),
    "credit-default": ("credit_default", "default_payment_next_month"),
}


@dataclass(frozen=True)
class Prepared:
    """Tensors of one table after noised counts."""

    encoder: TableEncoder
    train: Any
    x: Tensor  # held-out rows, or the official test part
    y: Tensor
    counts: tuple[Event, ...]


def folder_of(given: str | None) -> Path:
    """The folder of the data sets."""
    found = given or os.environ.get("CLIPWISE_DATA")
    if not found:
        raise SystemExit("Give --data DIR or set CLIPWISE_DATA: the folder with the compressed tables.")
    return Path(found)


@lru_cache(maxsize=8)
def opened(path: Path, target: str) -> TableSource:
    """A table, read once."""
    return TableSource(path, target)


@lru_cache(maxsize=8)
def prepared(folder: Path, name: str, epsilon: float, share: float, seed: int) -> Prepared:
    """A table with nothing declared: noised counts take `share` of the budget. Every tenth row is held out."""
    stem, target = (CHOSEN_ON | JUDGED_ON)[name]
    source = opened(folder / f"{stem}.csv.gz", target)
    events: list[Event] = []
    counts = NoisedCounts(
        noise_multiplier_for(share, epsilon, DELTA),
        events.append,
        delta=STRING_DELTA,
        key=NoiseKey.from_seed(seed, name.encode()),
    )
    is_held_out = np.arange(len(source)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    encoder = source.prepare(np.flatnonzero(~is_held_out), counts)
    x, y = encoder.encode(source, np.flatnonzero(is_held_out)).tensors
    return Prepared(encoder, encoder.encode(source, np.flatnonzero(~is_held_out)), x, y, tuple(events))


@lru_cache(maxsize=256)
def noise_for(counts: tuple[Event, ...], rate: float, steps: int, epsilon: float) -> float:
    """The noise of the steps with which counts and steps together are within the budget, by PLD."""

    def cost(z: float) -> float:
        step = Event(Sampling.POISSON, Adjacency.ZERO_OUT, Unit.RECORD, z, rate)
        return accounting.epsilon_of([*(Entry(each, 1) for each in counts), Entry(step, steps)], DELTA)

    low, high = math.log(0.3), math.log(200.0)
    while high - low > 2e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if cost(math.exp(middle)) > epsilon else (low, middle)
    return math.exp(high)


def accuracies(data: Prepared, settings: Settings, epsilon: float, seed: int) -> dict[str, float]:
    """Accuracy on the held-out rows after private training, of the last weights and of their average."""
    rate = settings.batch_size / len(data.train)
    steps = max(1, round(settings.epochs / rate))
    torch.manual_seed(seed)
    model = data.encoder.model(settings.model)
    with make_private(
        model,
        optimizer_of(model, settings),
        data.train,
        clipping=PerExample(max_norm=settings.max_norm),
        sample_rate=rate,
        steps=steps,
        noise_multiplier=noise_for(data.counts, rate, steps, epsilon),
        delta=DELTA,
        ema=settings.ema,
        seed=seed,
    ) as private:
        while private.steps < steps:
            for x, y in private.loader:
                private.step(data.encoder.loss(model(x), y) if len(x) else None)
                if private.steps == steps:
                    break
        found = {"last": accuracy(model, data)}
        with private.ema.applied():
            found["ema"] = accuracy(model, data)
    return found


def optimizer_of(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """The optimizer that settings name."""
    if settings.optimizer == "sgd":
        return torch.optim.SGD(
            model.parameters(), settings.learning_rate, settings.momentum, weight_decay=settings.weight_decay
        )
    return torch.optim.Adam(model.parameters(), settings.learning_rate, weight_decay=settings.weight_decay)


@torch.no_grad()
def accuracy(model: nn.Module, data: Prepared) -> float:
    """The share of right predictions on the held-out rows."""
    return float((model(data.x).argmax(1) == data.y).double().mean())


def scaled(settings: Settings, rows: int, share_of_rows: float) -> Settings:
    """The same settings with this sampling rate."""
    return replace(settings, batch_size=max(1, round(rows * share_of_rows)))
