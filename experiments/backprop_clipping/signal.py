"""Per-layer signal and noise along a run: a measurement of the paper's argument.

The paper claims that clipping during backpropagation keeps gradients from growing, and leaves more signal over the
noise than clipping them afterwards. So at points along a run, for each layer:

    gradient    |mean of the examples' gradients|, nothing clipped
    passed      the mean length of an example's gradient at the layer's output, as the clips of the layers behind it
                have left it; of clipped layers only
    signal      |mean of what is released of them|, clipped, without noise
    noise       the expected length of the noise on that mean: s sqrt(d) / L

These are measured on training images without noise. The data is public; for private records they must not be shown.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipwise import Adjacency, Unit
from clipwise.clipping import Site
from clipwise.layers.clipped import switch, unclipped
from clipwise.sampling.schemes import make_scheme
from experiments.backprop_clipping.sets import Images
from experiments.backprop_clipping.training import begun, judged, strategy
from experiments.backprop_clipping.trial import Trial
from experiments.harness.limits import Deadline
from experiments.harness.store import Cell
from experiments.harness.training import Training, losses_of

POINTS, _ROWS = 12, 1000


@dataclass(frozen=True)
class Signal:
    """Measure signal and noise along a private trial."""

    trial: Trial

    @property
    def epochs(self) -> int:
        """The epochs of its run."""
        return self.trial.epochs

    @property
    def data(self) -> str:
        """The data set of its run."""
        return self.trial.data

    @property
    def key(self) -> str:
        """A unique name."""
        return f"signal {self.trial.key}"


def run(job: Signal, images: Images, seed: int, deadline: Deadline, shared: Path | None = None) -> Cell:
    """Train, and measure at points spread over the steps, including the first step."""
    start = time.perf_counter()
    training = begun(job.trial, images, seed, shared)
    looks = {round(i * (training.steps - 1) / (POINTS - 1)) for i in range(POINTS)}
    curve = []
    for step in range(training.steps):
        deadline.require()
        if step in looks:
            curve.append({"step": step, "layers": measured(training, job.trial, images)})
        training.step()
    seconds = round(time.perf_counter() - start, 2)
    accuracy, _ = judged(training.model, images.held_out)
    words = {"curve": curve, "accuracy": accuracy, "seconds": seconds, "steps": training.steps}
    return words | training.cost()


def measured(training: Training, trial: Trial, images: Images) -> dict[str, dict[str, float]]:
    """Gradient, signal and noise of each layer, from the first layer to the last."""
    private, model = training.private, training.model
    assert private is not None
    parameters = dict(model.named_parameters())
    x, y = (tensor[:_ROWS] for tensor in images.train.tensors)
    scheme = make_scheme("poisson", dataset_size=len(images.train), sample_rate=trial.sample_rate)
    clipper = strategy(trial).attach(Site(model, parameters, Adjacency.ZERO_OUT, Unit.RECORD, scheme))
    clipped = clipper.clipped_sum(losses_of(model, x, y))
    with unclipped():
        found = torch.autograd.grad(losses_of(model, x, y).sum(), list(parameters.values()))
    as_they_are = dict(zip(parameters, found, strict=True))
    noise = _noise(training, parameters, clipper.divisor)
    signals, gradients = _per_layer(clipped, len(x)), _per_layer(as_they_are, len(x))
    passed = _passed(losses_of(model, x, y), parameters)
    return {
        name: {
            "gradient": round(gradients[name], 8),
            **({"passed": round(passed[name], 8)} if name in passed else {}),
            "signal": round(signals[name], 8),
            "noise": round(noise[name], 8),
        }
        for name in signals
    }


def _passed(losses: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, float]:
    """The mean of |g| over examples, g what comes back to a clipped layer."""
    found: dict[str, float] = {}

    def look(node: Any, g: Tensor) -> None:
        found[_layer(node.role.layer.name)] = float(g.flatten(1).norm(dim=1).mean())

    with switch.watched(look):
        torch.autograd.grad(losses.sum(), list(parameters.values()))
    return found


def _per_layer(sums: Mapping[str, Tensor], count: int) -> dict[str, float]:
    squares: dict[str, float] = defaultdict(float)
    for name, total in sums.items():
        squares[_layer(name)] += float(total.double().square().sum())
    return {name: math.sqrt(square) / count for name, square in squares.items()}


def _noise(training: Training, parameters: Mapping[str, Tensor], divisor: float) -> dict[str, float]:
    assert training.private is not None
    squares: dict[str, float] = defaultdict(float)
    for part in training.private.parts():
        for name in part.parameters:
            squares[_layer(name)] += part.noise_std**2 * parameters[name].numel()
    return {name: math.sqrt(square) / divisor for name, square in squares.items()}


def _layer(parameter: str) -> str:
    """A layer's place in the network, whether it is wrapped or not."""
    return parameter.split(".")[0]
