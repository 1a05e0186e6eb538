"""Training runs of the recipes of images and texts, for the searches of their defaults and for judging these."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import clipwise
from clipwise.ledger.durable_files import replace_file
from clipwise.recipes.kind import Encoder, Settings
from experiments.harness.calibration import multiplier
from experiments.harness.environment import environment

DELTA = 1e-5
HERE = Path(__file__).parent / "results"
Row = dict[str, Any]


def run(
    encoder: Encoder,
    settings: Settings,
    train: TensorDataset,
    test: TensorDataset,
    epsilon: float,
    *,
    seed: int = 0,
    as_if: int | None = None,
    model: Callable[[], nn.Module] | None = None,
) -> Row:
    """Train privately and return the accuracy on `test`, the privacy cost and the time.

    The seed is for the initial weights. It is published, so noise and batches come from the operating system.

    Args:
        as_if: train with the noise that so many records would need, in relation to their sum: a search on few public
            records then sees the noise of a larger data set. Such a run is not (epsilon, delta)-private.
        model: instead of the encoder's.
    """
    rows = len(train)
    rate = settings.batch_size / rows
    steps = max(1, round(settings.epochs / rate))
    noise = multiplier(epsilon, DELTA, rate, steps) * rows / (as_if or rows)
    torch.manual_seed(seed)
    network = encoder.model(settings.model) if model is None else model()
    optimizer = _optimizer(network, settings)
    begin = time.perf_counter()
    with clipwise.make_private(
        network,
        optimizer,
        train,
        clipping=clipwise.PerExample(max_norm=settings.max_norm),
        sample_rate=rate,
        steps=steps,
        noise_multiplier=noise,
        delta=DELTA,
        ema=settings.ema,
        augmentation=encoder.views(settings.views),
    ) as private:
        done = 0
        while done < steps:
            for *x, y in private.loader:
                private.step(encoder.loss(network(*x), y) if len(y) else None)
                done += 1
                if done == steps:
                    break
        spent = private.spent()
    seconds = time.perf_counter() - begin
    found: Row = {"epsilon": epsilon, "seed": seed, "as_if": as_if, "rows": rows, "steps": steps}
    found |= {"noise_multiplier": noise, "spent": None if as_if else spent.epsilon, "seconds": round(seconds, 1)}
    return found | {"accuracy": accuracy(network, test), "settings": asdict(settings)}


def _optimizer(network: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    trained = [p for p in network.parameters() if p.requires_grad]
    if settings.optimizer == "adam":
        return torch.optim.Adam(trained, settings.learning_rate)
    return torch.optim.SGD(trained, settings.learning_rate, settings.momentum, weight_decay=settings.weight_decay)


@torch.no_grad()
def accuracy(network: nn.Module, test: TensorDataset) -> float:
    """The share of correctly classified records."""
    network.eval()
    *x, y = test.tensors
    pieces = zip(*(each.split(1000) for each in x), strict=True)
    return float((torch.cat([network(*piece).argmax(1) for piece in pieces]) == y).double().mean())


def part(data: TensorDataset, rows: Sequence[int] | slice) -> TensorDataset:
    """Some of the records."""
    return TensorDataset(*(tensor[rows] for tensor in data.tensors))


class Results:
    """Rows of an experiment, written to `results/NAME.json` and printed as each run ends.

    An interrupted experiment continues: rows of the same command and environment are kept.
    """

    def __init__(self, name: str, command: str) -> None:
        self._file = HERE / f"{name}.json"
        self.rows: list[Row] = []
        self._head = {"command": command, "delta": DELTA, "environment": environment(torch.device("cpu"))}
        if self._file.is_file():
            found = json.loads(self._file.read_text())
            if {key: found[key] for key in self._head} == self._head:
                self.rows = found["rows"]

    def has(self, settings: Settings, **facts: Any) -> bool:
        """Whether there is a row with these settings and facts."""
        wanted = facts | {"settings": asdict(settings)}
        return any(all(row.get(key) == value for key, value in wanted.items()) for row in self.rows)

    def add(self, row: Row) -> None:
        """Keep a row."""
        self.rows.append(row)
        HERE.mkdir(exist_ok=True)
        text = json.dumps(self._head | {"rows": self.rows}, indent=1) + "\n"
        replace_file(self._file, lambda handle: handle.write(text.encode()), mode=0o644)
        shown = {key: value for key, value in row.items() if key not in ("settings",)}
        print(json.dumps(shown), flush=True)


def read(name: str) -> dict[str, Any]:
    """The results of an experiment."""
    found: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text())
    return found
