"""Train one trial, judge it once, and say what it cost."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import clipwise
from clipwise import layers
from clipwise.clipping import Strategy
from clipwise.clipping.backprop import clipped_layers, most_of_each
from experiments import models
from experiments.backprop_clipping.claims import DELTA
from experiments.backprop_clipping.sets import Images
from experiments.backprop_clipping.trial import Trial
from experiments.harness.calibration import multiplier
from experiments.harness.limits import Deadline
from experiments.harness.outcome import OutOfTimeError
from experiments.harness.store import Cell

MOMENTUM = 0.9
_PIECE = 1024  # colour images that go through a model at a time, so that several runs fit on one device
_ROWS = 1000  # that go through a model at a time, where nothing is trained


def run(trial: Trial, images: Images, seed: int, deadline: Deadline, shared: Path | None = None) -> Cell:
    """One run: accuracy and mean loss on the part that it is judged by, and the privacy that it spent.

    The seed is of the first weights only. It is published, so noise and batches do not come from it.

    Args:
        shared: a folder in which processes share calibrated noise.
    """
    start = time.perf_counter()
    training = Training(trial, images, seed, shared)
    for _ in range(training.steps):
        require_time(deadline)
        training.step()
    seconds = time.perf_counter() - start
    accuracy, loss = judged(training.model, images.held_out)
    result = {"accuracy": accuracy, "loss": round(loss, 5), "seconds": round(seconds, 2)}
    return result | {"steps": training.steps} | training.cost()


class Training:
    """A trial under way.

    Attributes:
        model: what is trained.
        steps: how many the trial has.
        private: the private run, or None without noise.
    """

    def __init__(self, trial: Trial, images: Images, seed: int, shared: Path | None = None) -> None:
        self._trial, self._images = trial, images
        self.steps = max(1, round(trial.epochs / trial.sample_rate))
        self._size = max(1, round(trial.sample_rate * len(images.train)))
        self.model = network(trial, images, seed)
        self._optimizer = _optimizer(trial, self.model)
        self.private: clipwise.Private | None = None
        if not trial.way.is_private:
            self._batches = self._shuffled()
            return
        assert trial.epsilon is not None
        self.private = clipwise.make_private(
            self.model,
            self._optimizer,
            images.train,
            clipping=strategy(trial),
            sample_rate=trial.sample_rate,
            steps=self.steps,
            noise_multiplier=multiplier(trial.epsilon, DELTA, trial.sample_rate, self.steps, shared),
            delta=DELTA,
            max_physical_batch_size=piece_of(images),
        )
        self._batches = self._drawn(self.private)
        self._private_step = self.private.compiled(partial(losses_of, self.model))

    def step(self) -> None:
        """One update."""
        self.model.train()
        if self.private is not None:
            while not self._private_step(*next(self._batches)):
                pass  # a piece of the batch
            return
        losses = losses_of(self.model, *next(self._batches))
        self._optimizer.zero_grad()
        losses.sum().backward()  # type: ignore[no-untyped-call]
        for p in self.model.parameters():
            assert p.grad is not None
            p.grad /= self._size  # afterwards: clips are for gradients of single losses, not of their mean
        self._optimizer.step()

    def cost(self) -> Cell:
        """What was spent, by PLD."""
        if self.private is None:
            return {"epsilon": None, "why_no_epsilon": "no privacy"}
        return spent(self.private)

    def _drawn(self, private: clipwise.Private) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from private.loader.pieces()

    def _shuffled(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = self._images.train.tensors
        while True:
            for rows in torch.randperm(len(x)).to(x.device).split(self._size):  # type: ignore[no-untyped-call]
                yield x[rows], y[rows]


def spent(private: clipwise.Private) -> Cell:
    """The end of a private run: what it cost."""
    with private:
        found = private.spent()
        return {
            "epsilon": found.epsilon,
            "delta": DELTA,
            "noise_multiplier": private.noise_multiplier,
            "adjacency": str(found.adjacency),
            "parts": len(private.parts()),
        }


def network(trial: Trial, images: Images, seed: int) -> nn.Module:
    """The paper's network with first weights from the seed, clipped where the method clips layers."""
    model = plain_network(images, seed, trial.way.activation, trial.way.norm)
    if trial.way.clips != "layers":
        return model
    return layers.clip_inputs(
        model,
        input_norm=trial.input_norm,
        grad_norm=trial.grad_norm,
        mode=trial.way.mode,
        bound=trial.way.bound,
    )


def plain_network(images: Images, seed: int, activation: str, norm: str = "none") -> nn.Module:
    """As printed, without bias. That for CIFAR-10 has padding and pools of stride 2: as printed it has 29 M weights."""
    device = images.train.tensors[0].device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        if images.name == "cifar10":
            model = models.backprop_cifar10(pool_stride=2, padding=True, activation=activation, norm=norm)
        else:
            model = models.backprop_mnist(activation=activation, norm=norm)
    return model.to(device)


def piece_of(images: Images) -> int | None:
    """How many images of a batch are handed out at a time; None for all. It changes no result."""
    return _PIECE if images.name == "cifar10" else None


def strategy(trial: Trial) -> Strategy:
    """How the method of a trial bounds what one record can do."""
    if trial.way.clips == "layers":
        return clipwise.Backprop()
    return clipwise.PerExample(max_norm=trial.max_norm, parts=trial.way.parts)


def _optimizer(trial: Trial, model: nn.Module) -> torch.optim.Optimizer:
    if trial.optimizer == "adam":
        on_device = next(model.parameters()).is_cuda  # then its step can be captured too
        return torch.optim.Adam(model.parameters(), trial.learning_rate, capturable=on_device)
    rate = trial.learning_rate / _most(trial, model)
    return torch.optim.SGD(model.parameters(), rate, momentum=MOMENTUM)


def _most(trial: Trial, model: nn.Module) -> float:
    """How far one example can move the gradient, in all; 1 where nothing bounds it."""
    if trial.way.clips == "layers":
        parameters = dict(model.named_parameters())
        return math.hypot(*most_of_each(parameters, clipped_layers(model)).values())
    return trial.max_norm if trial.way.clips == "examples" else 1.0


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """One loss an image."""
    return F.cross_entropy(model(x), y, reduction="none")


def require_time(deadline: Deadline) -> None:
    """Stop if the time is up: a run is short, and begins again."""
    if deadline.left() <= 0:
        raise OutOfTimeError


@torch.no_grad()
def judged(model: nn.Module, dataset: TensorDataset) -> tuple[float, float]:
    """The share of images whose class is found, and the mean cross-entropy."""
    model.eval()
    x, y = dataset.tensors
    outputs: Any = torch.cat([model(some) for some in x.split(_ROWS)])  # type: ignore[no-untyped-call]
    model.train()
    accuracy = float((outputs.argmax(1) == y).double().mean())
    return accuracy, float(F.cross_entropy(outputs.double(), y))
