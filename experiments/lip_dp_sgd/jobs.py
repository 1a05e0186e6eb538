"""The jobs of a process: training runs, times of an epoch, and the error of clipping."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.harness.limits import Deadline
from experiments.harness.store import Cell
from experiments.lip_dp_sgd.sets import Folder, Records, records
from experiments.lip_dp_sgd.training import begun, judged, run
from experiments.lip_dp_sgd.trial import Trial

# With fewer records a validation part is small: trials are evaluated by the mean over several parts.
SMALL, CUTS = 5000, 3
_TIMED_STEPS, _WARM_STEPS = 30, 5
_POINTS, _INSTANCES = 25, 500


@dataclass(frozen=True)
class Times:
    """Seconds per epoch at one batch size, for every method: figure 2."""

    data: str
    batch_size: int
    epochs: int = 0

    @property
    def key(self) -> str:
        """A name of its own."""
        return f"times {self.data} batch_size={self.batch_size}"


@dataclass(frozen=True)
class Bias:
    """The distance of the mean clipped gradient from the mean gradient, along a run of DP-SGD: figure 3."""

    trial: Trial

    @property
    def key(self) -> str:
        """A name of its own."""
        return f"bias {self.trial.key}"

    @property
    def epochs(self) -> int:
        """The epochs of its run."""
        return self.trial.epochs

    @property
    def data(self) -> str:
        """The data set of its run."""
        return self.trial.data


Job = Trial | Times | Bias


@dataclass(frozen=True)
class Bench:
    """The environment of jobs: the folder of data sets, the device, the deadline, and a folder for calibrated noise."""

    data: Folder
    device: torch.device
    deadline: Deadline
    shared: Path | None = None


def work(job: Job, bench: Bench, seed: int, judged_by: str) -> Cell:
    """Do a job."""
    parts = partial(records, job.data, bench.data, bench.device)
    if isinstance(job, Times):
        return times(job, parts(), bench.deadline)
    if isinstance(job, Bias):
        return bias(job, parts(), seed, bench.deadline, bench.shared)
    whole = parts(judged_by=judged_by)
    if judged_by == "test" or len(whole.train) >= SMALL:
        return run(job, whole, seed, bench.deadline, bench.shared)
    found = [run(job, parts(cut=cut), seed + cut, bench.deadline, bench.shared) for cut in range(CUTS)]
    mean = {name: statistics.fmean(r[name] for r in found) for name in ("accuracy", "loss")}
    # The parts overlap. The choice by their mean is not accounted for either.
    return found[0] | mean | {"seconds": sum(r["seconds"] for r in found), "epsilon": _most(found)}


def _most(found: list[Cell]) -> float | None:
    spent = [r["epsilon"] for r in found if r["epsilon"] is not None]
    return max(spent) if spent else None


def times(job: Times, at_hand: Records, deadline: Deadline) -> Cell:
    """Median seconds of a step of each method, measured in turns, times the steps of an epoch."""
    options: dict[str, Any] = {"batch_size": job.batch_size, "epochs": 1}
    trials = {
        method: Trial(job.data, method, noise_multiplier=None if method == "plain" else 1.0, **options)
        for method in ("plain", "dp-sgd", "lip")
    }
    runs = {method: begun(trial, at_hand, 0) for method, trial in trials.items()}
    device = at_hand.train.tensors[0].device
    seconds: dict[str, list[float]] = {method: [] for method in runs}
    for number in range(_WARM_STEPS + _TIMED_STEPS):
        for method, training in runs.items():
            deadline.require()
            _wait(device)
            start = time.perf_counter()
            training.step()
            _wait(device)
            if number >= _WARM_STEPS:
                seconds[method].append(time.perf_counter() - start)
    epoch = len(at_hand.train) / job.batch_size
    found = {method: round(epoch * statistics.median(values), 4) for method, values in seconds.items()}
    accuracy, _ = judged(runs["dp-sgd"].model, at_hand.held_out)  # after a few steps: only a check
    total = round(sum(map(sum, seconds.values())), 2)
    return {"seconds_of_an_epoch": found, "accuracy": accuracy, "seconds": total, "epsilon": None}


def bias(job: Bias, at_hand: Records, seed: int, deadline: Deadline, shared: Path | None = None) -> Cell:
    """Norms of mean gradients, clipped and not, on the first records, at points along the run.

    These norms are measured without noise. The data is public; for private records they must not be shown.
    """
    training = begun(job.trial, at_hand, seed, shared)
    x, y = (tensor[:_INSTANCES] for tensor in at_hand.train.tensors)
    shown = {round(i * (training.steps - 1) / (_POINTS - 1)) for i in range(_POINTS)}
    curve: list[dict[str, float]] = []
    start = time.perf_counter()
    for step in range(training.steps):
        deadline.require()
        training.step()
        if step in shown:
            curve.append({"step": step + 1, **_norms(training.model, x, y, job.trial.max_norm)})
    seconds = round(time.perf_counter() - start, 2)
    accuracy, _ = judged(training.model, at_hand.held_out)
    return {"curve": curve, "accuracy": accuracy, "seconds": seconds} | training.cost()


def _norms(model: torch.nn.Module, x: Tensor, y: Tensor, max_norm: float) -> dict[str, float]:
    """|mean g - mean clip(g)|, |mean clip(g)|, and the share of gradients that the clip shortens."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(p: dict[str, Tensor], one_x: Tensor, one_y: Tensor) -> Tensor:
        outputs = torch.func.functional_call(_without_first(model), p, (one_x.unsqueeze(0),))
        return torch.nn.functional.cross_entropy(outputs, one_y.unsqueeze(0))

    clipped_inputs = model[0](x)  # type: ignore[index]
    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, clipped_inputs.detach(), y)
    g_Bd = torch.cat([g.flatten(1) for g in grads.values()], dim=1)
    norms_B = g_Bd.norm(dim=1)
    clipped_Bd = g_Bd * (max_norm / norms_B).clamp(max=1).unsqueeze(1)
    error = (g_Bd.mean(0) - clipped_Bd.mean(0)).norm()
    return {
        "error": round(float(error), 6),
        "clipped": round(float(clipped_Bd.mean(0).norm()), 6),
        "share_clipped": round(float((norms_B > max_norm).double().mean()), 4),
    }


def _without_first(model: torch.nn.Module) -> torch.nn.Module:
    """The same modules under the same names, without the clip of inputs, which vmap does not support."""
    layers = list(model.children())
    return torch.nn.Sequential(torch.nn.Identity(), *layers[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
