"""Training of a trial."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipwise
from clipwise import layers
from clipwise.clipping import Strategy
from clipwise.clipping.backprop import most_of_each
from experiments import models
from experiments.backprop_clipping.claims import DELTA
from experiments.backprop_clipping.sets import Images
from experiments.backprop_clipping.trial import Trial
from experiments.harness import training
from experiments.harness.calibration import multiplier
from experiments.harness.limits import Deadline
from experiments.harness.store import Cell
from experiments.harness.training import Training, drawn, losses_of, shuffled

MOMENTUM = 0.9
_PIECE = 1024  # colour images per piece, so that several runs fit on one device
_ROWS = 1000  # batch size of evaluation


def run(trial: Trial, images: Images, seed: int, deadline: Deadline, shared: Path | None = None) -> Cell:
    """One run, with a seed for the first weights and a folder in which processes share calibrated noise."""
    return training.run(lambda: begun(trial, images, seed, shared), images.held_out, _ROWS, deadline)


def judged(model: nn.Module, dataset: TensorDataset) -> tuple[float, float]:
    """Accuracy and mean cross-entropy."""
    return training.judged(model, dataset, _ROWS)


def begun(trial: Trial, images: Images, seed: int, shared: Path | None = None) -> Training:
    """A run before its first step.

    The seed determines only the initial weights. It is published, so noise and batches do not come from it.
    """
    steps = max(1, round(trial.epochs / trial.sample_rate))
    size = max(1, round(trial.sample_rate * len(images.train)))
    model = network(trial, images, seed)
    optimizer = _optimizer(trial, model)

    def plain_update(x: Tensor, y: Tensor) -> bool:
        optimizer.zero_grad()
        losses_of(model, x, y).sum().backward()  # type: ignore[no-untyped-call]
        for p in model.parameters():
            assert p.grad is not None
            p.grad /= size  # after the backward pass: the clips apply to gradients of single losses, not of their mean
        optimizer.step()
        return True

    if not trial.way.is_private:
        return Training(model, steps, plain_update, shuffled(images.train, size))
    assert trial.epsilon is not None
    private = clipwise.make_private(
        model,
        optimizer,
        images.train,
        clipping=strategy(trial),
        sample_rate=trial.sample_rate,
        steps=steps,
        noise_multiplier=multiplier(trial.epsilon, DELTA, trial.sample_rate, steps, shared),
        delta=DELTA,
        max_physical_batch_size=piece_of(images),
    )
    step = private.compiled(partial(losses_of, model))
    return Training(model, steps, step, drawn(private), private)


def network(trial: Trial, images: Images, seed: int) -> nn.Module:
    """The paper's network with initial weights from the seed, with clipped layers if the method clips layers."""
    model = plain_network(images, seed, trial.way.activation, trial.way.norm)
    if trial.way.clips != "layers":
        return model
    return layers.clip_inputs(
        model, input_norm=trial.input_norm, grad_norm=trial.grad_norm, mode=trial.way.mode, bound=trial.way.bound
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
    """The number of images per piece of a batch; None for all. It does not change results."""
    return _PIECE if images.name == "cifar10" else None


def strategy(trial: Trial) -> Strategy:
    """The clipping strategy of a trial."""
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
    """The bound on the change of the gradient by one example; 1 without a bound."""
    if trial.way.clips == "layers":
        parameters = dict(model.named_parameters())
        return math.hypot(*most_of_each(parameters, clipwise.Backprop().layers_of(model, parameters)).values())
    return trial.max_norm if trial.way.clips == "examples" else 1.0
