"""Training of a trial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipwise
from clipwise.clipping import PerExample, Strategy
from clipwise.lipschitz import SoftmaxCrossEntropy
from clipwise.optim.averaging import AveragedParameters
from experiments import models
from experiments.harness import training
from experiments.harness.calibration import multiplier
from experiments.harness.limits import Deadline
from experiments.harness.store import Cell
from experiments.harness.training import Training, drawn, shuffled
from experiments.lip_dp_sgd.sets import Records
from experiments.lip_dp_sgd.trial import Trial
from experiments.models import make_orthogonal_

_ROWS = 2048  # batch size of evaluation
_ROWS_TRAINED = 4096  # per piece: larger batches are split to limit memory
_ROWS_CAPTURED = 1024  # per piece of a captured step


def run(
    trial: Trial, records: Records, seed: int, deadline: Deadline | None = None, shared: Path | None = None
) -> Cell:
    """One run, with a seed for the first weights and a folder in which processes share calibrated noise."""
    return training.run(lambda: begun(trial, records, seed, shared), records.held_out, _ROWS, deadline)


def judged(model: nn.Module, dataset: TensorDataset) -> tuple[float, float]:
    """Accuracy and mean cross-entropy."""
    return training.judged(model, dataset, _ROWS)


def begun(trial: Trial, records: Records, seed: int, shared: Path | None = None) -> Training:
    """A run before its first step.

    The seed determines only the initial weights. It is published, so noise and batches do not come from it.
    """
    count = len(records.train)
    rate = rate_of(trial, count)
    steps = max(1, round(trial.epochs / rate))
    loss = SoftmaxCrossEntropy(trial.temperature)
    model = network(trial, records, seed)
    optimizer = torch.optim.Adam(model.parameters(), trial.learning_rate)
    average = None if trial.averaged is None else AveragedParameters(model, trial.averaged)

    def plain_update(x: Tensor, y: Tensor) -> bool:
        # With backward() the clip of the inputs would make the first layer compute an unused input gradient.
        parameters = list(model.parameters())
        found = torch.autograd.grad(loss(model(x), y).mean(), parameters)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient
        optimizer.step()
        return True

    if trial.method == "plain":
        batches = shuffled(records.train, max(1, round(rate * count)))
        return Training(model, steps, plain_update, batches, average=average)
    noise = trial.noise_multiplier
    if noise is None:
        assert trial.epsilon is not None
        noise = multiplier(trial.epsilon, records.delta, rate, steps, shared)
    private = clipwise.make_private(
        model,
        optimizer,
        records.train,
        clipping=strategy(trial, records),
        sample_rate=rate,
        steps=steps,
        noise_multiplier=noise,
        delta=records.delta,
        max_physical_batch_size=_ROWS_TRAINED,
    )

    def update(x: Tensor, y: Tensor) -> bool:
        if len(x) == 0:
            return private.step(None)
        outputs = model(x)
        return private.step(loss(outputs, y), outputs=outputs)

    if not trial.is_lipschitz:
        is_large = rate * count > _ROWS_CAPTURED
        step = private.compiled(lambda x, y: loss(model(x), y), _ROWS_CAPTURED if is_large else None)
        return Training(model, steps, step, drawn(private), private, average)
    return Training(model, steps, update, drawn(private), private, average)


def rate_of(trial: Trial, count: int) -> float:
    """The probability that a record is in a batch."""
    if trial.sample_rate is not None:
        return trial.sample_rate
    assert trial.batch_size is not None
    return min(1.0, trial.batch_size / count)


def network(trial: Trial, records: Records, seed: int) -> nn.Module:
    """The network of the trial or else of the records, with initial weights from the seed."""
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
    """The clipping strategy of a trial."""
    if not trial.is_lipschitz:
        return PerExample(max_norm=trial.max_norm)
    return clipwise.Lipschitz(
        max_weight_norm=trial.max_norm,
        input_norm=records.input_norm,
        fixed=trial.method == "fix-lip",
        split=trial.split,
        loss=SoftmaxCrossEntropy(trial.temperature),
    )
