"""A training run: endless batches, one update for each, and the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import clipwise
from clipwise.optim.averaging import AveragedParameters
from experiments.harness.limits import Deadline
from experiments.harness.store import Cell

Batches = Iterator[tuple[Tensor, Tensor]]


@dataclass
class Training:
    """A training run.

    Attributes:
        model: the model.
        steps: the number of steps of the run.
        update: trains on a batch or, in private training, on a piece of one. It returns whether that was the last
            piece, after which the model was updated.
        batches: endless batches.
        private: the private run, or None without noise.
        average: the average of the parameters, if any.
    """

    model: nn.Module
    steps: int
    update: Callable[[Tensor, Tensor], bool]
    batches: Batches
    private: clipwise.Private | None = None
    average: AveragedParameters | None = None

    def step(self) -> None:
        """One update."""
        self.model.train()
        while not self.update(*next(self.batches)):
            pass  # the batch has more pieces
        if self.average is not None:
            self.average.update()

    def all_steps(self, deadline: Deadline | None = None) -> Training:
        """Make all steps. Raises if the time is up before the end."""
        for _ in range(self.steps):
            if deadline is not None:
                deadline.require()
            self.step()
        return self

    def cost(self) -> Cell:
        """End a private run; returns the privacy spent, by PLD."""
        return {"epsilon": None, "why_no_epsilon": "no privacy"} if self.private is None else spent(self.private)


def spent(private: clipwise.Private) -> Cell:
    """End a private run; returns its cost."""
    with private:
        found = private.spent()
        return {
            "epsilon": found.epsilon,
            "delta": found.delta,
            "noise_multiplier": private.noise_multiplier,
            "adjacency": str(found.adjacency),
            "parts": len(private.parts()),
        }


def run(begin: Callable[[], Training], held_out: TensorDataset, rows: int, deadline: Deadline | None) -> Cell:
    """One run: accuracy and mean loss on the evaluation part, and the privacy spent.

    Args:
        begin: creates the run.
        held_out: the evaluation part, read once at the end.
        rows: batch size of the evaluation.
    """
    start = time.perf_counter()
    training = begin().all_steps(deadline)
    seconds = time.perf_counter() - start
    accuracy, loss = judged(training.model, held_out, rows)
    result: dict[str, Any] = {"accuracy": accuracy, "loss": round(loss, 5), "seconds": round(seconds, 2)}
    if training.average is not None:
        with training.average.applied():
            result["averaged_accuracy"] = judged(training.model, held_out, rows)[0]
    return result | {"steps": training.steps} | training.cost()


def drawn(private: clipwise.Private) -> Batches:
    """Endless pieces of private batches."""
    while True:
        yield from private.loader.pieces()


def shuffled(train: TensorDataset, size: int) -> Batches:
    """Endless shuffled batches."""
    x, y = train.tensors
    while True:
        for rows in torch.randperm(len(x)).to(x.device).split(size):  # type: ignore[no-untyped-call]
            yield x[rows], y[rows]


def losses_of(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """One cross-entropy per example."""
    return F.cross_entropy(model(x), y, reduction="none")


@torch.no_grad()
def judged(model: nn.Module, dataset: TensorDataset, rows: int) -> tuple[float, float]:
    """The accuracy and the mean cross-entropy."""
    was_training = model.training
    model.eval()
    x, y = dataset.tensors
    outputs: Any = torch.cat([model(some) for some in x.split(rows)])  # type: ignore[no-untyped-call]
    model.train(was_training)
    accuracy = float((outputs.argmax(1) == y).double().mean())
    return accuracy, float(F.cross_entropy(outputs.double(), y))
