"""Run one trial: train, judge once, and say what it cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import clipwise
from clipwise.clipping import PerExample, Strategy
from clipwise.lipschitz import SoftmaxCrossEntropy
from clipwise.optim.averaging import AveragedParameters
from experiments import models
from experiments.harness.calibration import multiplier
from experiments.harness.limits import Deadline
from experiments.lip_dp_sgd.sets import Records
from experiments.lip_dp_sgd.trial import Trial
from experiments.models.first_weights import make_orthogonal_

_ROWS = 2048  # that go through a model at a time, where nothing is trained
_ROWS_TRAINED = 4096  # at a time: larger batches come in pieces, for the sake of memory
_ROWS_CAPTURED = 1024  # at a time, where a step is captured in a CUDA graph
Result = dict[str, Any]


class LateError(Exception):
    """The time is up in the middle of a run, which leaves no result."""


def run(
    trial: Trial, records: Records, seed: int, deadline: Deadline | None = None, shared: Path | None = None
) -> Result:
    """One run: accuracy and mean loss on the part that it is judged by, and the privacy that it spent.

    The seed is of the first weights only. It is published, so noise and batches do not come from it.

    Args:
        shared: a folder in which processes share calibrated noise.
    """
    start = time.perf_counter()
    training = trained(trial, records, seed, deadline, shared)
    seconds = time.perf_counter() - start
    accuracy, loss = judged(training.model, records.held_out)
    result: Result = {"accuracy": accuracy, "loss": round(loss, 5), "seconds": round(seconds, 2)}
    if training.average is not None:
        with training.average.applied():
            result["averaged_accuracy"] = judged(training.model, records.held_out)[0]
    return result | {"steps": training.steps} | training.cost()


def trained(
    trial: Trial, records: Records, seed: int, deadline: Deadline | None = None, shared: Path | None = None
) -> Training:
    """All steps of a run, not judged yet."""
    deadline = deadline or Deadline(None)
    training = Training(trial, records, seed, shared)
    for _ in range(training.steps):
        if deadline.left() <= 0:
            raise LateError
        training.step()
    return training


class Training:
    """A trial under way.

    Attributes:
        model: what is trained.
        steps: how many the trial has.
        private: the private run, or None for "plain".
        average: of the parameters, if the trial asks for it.
    """

    def __init__(self, trial: Trial, records: Records, seed: int, shared: Path | None = None) -> None:
        self._trial, self._records = trial, records
        count = len(records.train)
        self._rate = rate_of(trial, count)
        self.steps = max(1, round(trial.epochs / self._rate))
        self._loss = SoftmaxCrossEntropy(trial.temperature)
        self.model = network(trial, records, seed)
        self._optimizer = torch.optim.Adam(self.model.parameters(), trial.learning_rate)
        self.average = None if trial.averaged is None else AveragedParameters(self.model, trial.averaged)
        self.private: clipwise.Private | None = None
        if trial.method == "plain":
            self._batches = self._shuffled(max(1, round(self._rate * count)))
            return
        noise = trial.noise_multiplier
        if noise is None:
            assert trial.epsilon is not None
            noise = multiplier(trial.epsilon, records.delta, self._rate, self.steps, shared)
        self.private = clipwise.make_private(
            self.model,
            self._optimizer,
            records.train,
            clipping=strategy(trial, records),
            sample_rate=self._rate,
            steps=self.steps,
            noise_multiplier=noise,
            delta=records.delta,
            max_physical_batch_size=_ROWS_TRAINED,
        )
        self._batches = self._drawn(self.private)
        if not trial.is_lipschitz:
            is_large = self._rate * count > _ROWS_CAPTURED
            self._compiled = self.private.compiled(self._losses, _ROWS_CAPTURED if is_large else None)

    def step(self) -> None:
        """One update."""
        self.model.train()
        while not self._gathered(*next(self._batches)):
            pass  # the batch has more pieces
        if self.average is not None:
            self.average.update()

    def _gathered(self, x: Tensor, y: Tensor) -> bool:
        """Learn from a piece of a batch; whether it was the last one, with which the update came."""
        if self.private is None:
            # (With backward() the clip of the inputs would ask the first layer for a gradient that nobody needs.)
            parameters = list(self.model.parameters())
            found = torch.autograd.grad(self._loss(self.model(x), y).mean(), parameters)
            for parameter, gradient in zip(parameters, found, strict=True):
                parameter.grad = gradient
            self._optimizer.step()
            return True
        if not self._trial.is_lipschitz:
            return self._compiled(x, y)
        if len(x) == 0:
            return self.private.step(None)
        outputs = self.model(x)
        return self.private.step(self._loss(outputs, y), outputs=outputs)

    def _losses(self, x: Tensor, y: Tensor) -> Tensor:
        return self._loss(self.model(x), y)

    def cost(self) -> Result:
        """What was spent, by PLD."""
        if self.private is None:
            return {"epsilon": None, "why_no_epsilon": "no privacy"}
        with self.private as private:
            spent = private.spent()
            return {
                "epsilon": spent.epsilon,
                "delta": self._records.delta,
                "noise_multiplier": private.noise_multiplier,
                "adjacency": str(spent.adjacency),
            }

    def _drawn(self, private: clipwise.Private) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from private.loader.pieces()

    def _shuffled(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = self._records.train.tensors
        while True:
            for rows in torch.randperm(len(x)).to(x.device).split(size):  # type: ignore[no-untyped-call]
                yield x[rows], y[rows]


def rate_of(trial: Trial, count: int) -> float:
    """The probability that a record is in a batch."""
    if trial.sample_rate is not None:
        return trial.sample_rate
    assert trial.batch_size is not None
    return min(1.0, trial.batch_size / count)


def network(trial: Trial, records: Records, seed: int) -> nn.Module:
    """The network of the trial or else of the records, with first weights from the seed."""
    options: dict[str, Any] = {"norm": trial.norm, "groups": trial.groups, "alpha": trial.alpha}
    options |= {"input_norm": records.input_norm}
    if len(records.shape) == 1:
        options["features"] = records.shape[0]
    else:
        options["image_channels"] = records.shape[0]
    devices = [records.train.tensors[0].device]
    with torch.random.fork_rng(devices=[d for d in devices if d.type == "cuda"]):
        torch.manual_seed(seed)
        model = models.build(trial.network or records.model, classes=records.classes, **options)
        if trial.first_weights == "orthogonal":
            make_orthogonal_(model)
    return model.to(devices[0])


def strategy(trial: Trial, records: Records) -> Strategy:
    """How the method of a trial bounds what one record can do."""
    if not trial.is_lipschitz:
        return PerExample(max_norm=trial.max_norm)
    return clipwise.Lipschitz(
        max_weight_norm=trial.max_norm,
        input_norm=records.input_norm,
        fixed=trial.method == "fix-lip",
        split=trial.split,
        loss=SoftmaxCrossEntropy(trial.temperature),
    )


@torch.no_grad()
def judged(model: nn.Module, dataset: TensorDataset) -> tuple[float, float]:
    """The share of records whose class is found, and the mean cross-entropy."""
    was_training = model.training
    model.eval()
    x, y = dataset.tensors
    outputs = torch.cat([model(some) for some in x.split(_ROWS)])  # type: ignore[no-untyped-call]
    model.train(was_training)
    accuracy = float((outputs.argmax(1) == y).double().mean())
    return accuracy, float(F.cross_entropy(outputs.double(), y))
