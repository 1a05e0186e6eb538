"""Train one setting; return its accuracy and privacy cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipwise
from clipwise import layers
from clipwise.clipping.base import Strategy
from clipwise.layers.public_statistics import AllPublicStatistics
from experiments.harness.environment import device_of
from experiments.harness.limits import Deadline, reading_data
from experiments.harness.paper import Options, Task
from experiments.harness.store import Cell
from experiments.harness.training import losses_of
from experiments.normalization.networks import network
from experiments.normalization.sets import Sets, load, public_rows
from experiments.normalization.setting import Setting

DELTA, MAX_NORM, MOMENTUM = 1e-5, 0.1, 0.9
MICROBATCH = 16  # expected size of a clipped microbatch
_ROWS = 500  # batch size of evaluation; batch norm without running statistics uses its statistics


def train_task(task: Task, options: Options, deadline: Deadline, unfinished: Path) -> Cell:
    """A run on the data of its setting. It is short, so a stopped run starts again."""
    setting, device = task.setting, device_of(options.device)
    assert isinstance(setting, Setting)
    of_data = setting.data, setting.side, options.data, device
    with reading_data():
        parts = _sets(*of_data, task.judged_by, setting.is_private)
        rows = _rows(*of_data) if setting.needs_public_rows else None
    # The search for the fastest convolution pays only if shapes repeat. Those of private batches do not.
    torch.backends.cudnn.benchmark = not setting.is_private
    return train(setting, parts, rows, task.seed, deadline)


@lru_cache(maxsize=2)
def _sets(name: str, side: int, data: Path | None, device: torch.device, judged_by: str, is_private: bool) -> Sets:
    return load(name, side, data, device, judged_by=judged_by, trains_on_all=is_private)


@lru_cache(maxsize=2)
def _rows(name: str, side: int, data: Path | None, device: torch.device) -> Tensor:
    return public_rows(name, side, data, device)


def train(setting: Setting, sets: Sets, rows: Tensor | None, seed: int, deadline: Deadline) -> dict[str, Any]:
    """One run. The evaluation part is read once, at the end.

    The seed determines the initial weights and the noise on weights. It is published, so the noise that makes a run
    private, and its batches, do not come from it. `rows` are the public rows, if the setting needs them.
    """
    start = time.perf_counter()
    x = sets.train.tensors[0]
    classes = 1 + int(sets.held_out.tensors[1].max())
    model = network(setting, seed, x.shape[1] if setting.side else 0, classes, sets.public, rows)
    how = _privately if setting.is_private else _openly
    found = how(setting, model, sets, deadline)
    if setting.clips_microbatches and rows is not None:
        pieces: Callable[[int], tuple[Tensor, ...]] = rows.split
        layers.recompute_statistics(model, pieces(MICROBATCH))
    return {
        "accuracy": _accuracy(model, sets.held_out),
        **found,
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "seconds": round(time.perf_counter() - start, 1),
    }


def _openly(setting: Setting, model: nn.Module, sets: Sets, deadline: Deadline) -> dict[str, Any]:
    """Adam on shuffled batches, without privacy; the accuracy on the validation part after each epoch."""
    x, y = sets.train.tensors
    optimizer = torch.optim.Adam(model.parameters(), setting.learning_rate, fused=x.is_cuda)
    curve = []
    for _ in range(setting.epochs):
        model.train()
        for chosen in torch.randperm(len(x)).to(x.device).split(setting.batch_size):  # type: ignore[no-untyped-call]
            if len(chosen) > 1:  # batch norm needs two rows
                deadline.require()
                optimizer.zero_grad()
                losses_of(model, x[chosen], y[chosen]).mean().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        curve.append(round(_accuracy(model, sets.validation), 4))
    return {"validation_accuracy_by_epoch": curve, "epsilon": None, "why_no_epsilon": "no privacy"}


def _privately(setting: Setting, model: nn.Module, sets: Sets, deadline: Deadline) -> dict[str, Any]:
    """Flat clipping on Poisson batches; the engine refreshes public statistics."""
    trained = [p for p in model.parameters() if p.requires_grad]
    clipping, rate = _clipping(setting)
    private = clipwise.make_private(
        model,
        torch.optim.SGD(trained, rate, momentum=MOMENTUM),
        sets.train,
        clipping=clipping,
        batch_size=setting.batch_size,
        epochs=setting.epochs,
        epsilon=setting.epsilon,
        delta=DELTA,
    )
    with private:
        step = private.compiled(partial(losses_of, model))
        for _ in range(setting.epochs):
            model.train()
            for x, y in private.loader.pieces():
                deadline.require()
                step(x, y)
        spent = private.spent()
        return {
            "epsilon": spent.epsilon,
            "delta": spent.delta,
            "adjacency": str(spent.adjacency),
            "steps": private.steps,
            "noise_multiplier": private.noise_multiplier,
            "parts": len(private.parts()),
            "in_words": str(spent),
        }


def _clipping(setting: Setting) -> tuple[Strategy, float]:
    """The strategy, and the learning rate at which an update's noise is that of per-example clipping at the same z.

    A coordinate of the gradient has noise z C / B with examples, z 2 C / k with k microbatches.
    """
    rule = clipwise.NoisedStatistics() if setting.releases_statistics else None
    if not setting.clips_microbatches:
        return clipwise.PerExample(max_norm=MAX_NORM, running_statistics=rule), setting.learning_rate
    microbatches = setting.batch_size // MICROBATCH
    rate = setting.learning_rate * microbatches / (2 * setting.batch_size)
    return clipwise.Batch(max_norm=MAX_NORM, microbatches=microbatches, running_statistics=rule), rate


@torch.no_grad()
def _accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    """The share of correctly classified examples."""
    model.eval()
    AllPublicStatistics(model).refresh()
    x, y = dataset.tensors
    pieces: Callable[[int], tuple[Tensor, ...]] = x.split
    found = torch.cat([model(some).argmax(1) for some in pieces(_ROWS)])
    return float((found == y).double().mean())
