"""The paper's Transformer on a sample of IMDB: test accuracy at a stated epsilon, and without privacy.

    python -m experiments fast-clipping --data DIR --device cuda --epsilon 3 --epsilon 8 --seeds 3

The settings were chosen before the first run. None was tuned on any text.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import clipwise
from benchmarks.networks.small import Reader
from benchmarks.shapes import Tokens
from clipwise.errors import ConfigurationError
from experiments.harness.command import parser_of
from experiments.harness.environment import device_of, environment

from . import report
from .texts import BUCKETS, LENGTH, PADDING, read

LEARNING_RATE, MAX_NORM, DELTA = 1e-3, 1.0, 1e-5
Trained = tuple[nn.Module, dict[str, Any]]  # a model and its privacy cost


class Transformer(Reader):
    """The one-block model of the benchmarks, with a mean over words without padding."""

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) ids to (B, classes)."""
        is_word = (ids != PADDING).unsqueeze(-1)
        states = self.block((self.words(ids) + self.positions) * is_word)
        return self.head((states * is_word).sum(1) / is_word.sum(1).clamp(min=1))  # type: ignore[no-any-return]


def build(seed: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with frozen word vectors and initial weights from a public seed, and its optimizer."""
    torch.manual_seed(seed)
    model = Transformer(Tokens(LENGTH, BUCKETS)).to(device)
    return model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad], LEARNING_RATE)


def loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """One loss per text."""
    return F.cross_entropy(model(ids), labels, reduction="none")


def require_accepted(device: torch.device) -> None:
    """Check on synthetic texts that texts are independent: behind a frozen embedding no gradient would show it."""
    ids, labels = Tokens(LENGTH, BUCKETS).draw(4)
    ids[0, LENGTH // 2 :] = PADDING
    found = clipwise.check(build(0, device)[0], loss, (ids.to(device), labels.to(device)))
    if not found:
        raise ConfigurationError(str(found))


def train_privately(train: TensorDataset, epsilon: float, seed: int, options: argparse.Namespace) -> Trained:
    """The seed is published, so noise and sampling do not come from it but from the operating system."""
    model, optimizer = build(seed, train.tensors[0].device)
    private = clipwise.make_private(
        model,
        optimizer,
        train,
        clipping=clipwise.PerExample(max_norm=MAX_NORM),
        batch_size=options.batch_size,
        epochs=options.epochs,
        epsilon=epsilon,
        delta=DELTA,
    )
    with private:
        for _ in range(options.epochs):
            for ids, labels in private.loader:
                private.step(loss(model, ids, labels) if len(ids) else None)
        spent = private.spent()
    cost = {"epsilon": spent.epsilon, "delta": spent.delta, "steps": spent.steps, "in_words": str(spent)}
    return model, {"spent": cost, "noise_multiplier": private.noise_multiplier}


def train_openly(train: TensorDataset, seed: int, options: argparse.Namespace) -> Trained:
    """The same model, optimizer, batch size and epochs, on shuffled batches and without privacy."""
    ids, labels = train.tensors
    model, optimizer = build(seed, ids.device)
    for _ in range(options.epochs):
        for rows in torch.randperm(len(ids)).to(ids.device).split(options.batch_size):
            optimizer.zero_grad()
            loss(model, ids[rows], labels[rows]).mean().backward()
            optimizer.step()
    return model, {"spent": None}


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """The share of correctly classified texts."""
    ids, labels = test.tensors
    found = torch.cat([model(some).argmax(1) for some in ids.split(500)])
    return float((found == labels).double().mean())


def run(options: argparse.Namespace) -> None:
    """Run every seed without privacy and at every epsilon. Each finished run is written to disk at once."""
    device = device_of(options.device)
    train, test = (read(options.data, split, device) for split in ("train", "test"))
    require_accepted(device)
    command = (
        f"python -m experiments fast-clipping --data DIR --device {options.device} --seeds {options.seeds} "
        f"--epochs {options.epochs} --batch-size {options.batch_size}"
    )
    results: dict[str, Any] = {
        "command": command + "".join(f" --epsilon {epsilon:g}" for epsilon in options.epsilon),
        "environment": environment(device),
        "commoner_class": float(test.tensors[1].bincount().max()) / len(test),
        "runs": [],
    }
    for budget in (None, *options.epsilon):
        for seed in range(options.seeds):
            if budget is None:
                model, cost = train_openly(train, seed, options)
            else:
                model, cost = train_privately(train, budget, seed, options)
            # The only use of the test texts: they choose nothing.
            results["runs"].append({"budget": budget, "seed": seed, "accuracy": accuracy(model, test)} | cost)
            report.write(options.out, results)
            print(results["runs"][-1], flush=True)


def main(arguments: Sequence[str]) -> None:
    """The command line."""
    parser = parser_of("python -m experiments fast-clipping", __doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of imdb_{train,test}.csv.xz")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--epsilon", type=float, action="append", default=[], help="once for each budget")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=512, help="the expected one, where it is private")
    parser.add_argument("--out", type=Path, default=Path("experiments/fast_clipping/results"))
    run(parser.parse_args(arguments))
