"""The network and data of a measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.networks import build, train_only
from benchmarks.shapes import Images, shape_of

LEARNING_RATE = 1e-3
BATCHES = 4  # in the synthetic data set: the steps per epoch

# `foreach` updates all parameters in a few launches, `fused` in one.
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "sgd-foreach": partial(torch.optim.SGD, foreach=True),
    "sgd-fused": partial(torch.optim.SGD, fused=True),
}


@dataclass(frozen=True)
class Setting:
    """What is measured: a network, its data and a batch size.

    Args:
        model, data: names that `build` and `shape_of` accept.
        batch: examples per step.
        trained: the trained parameters: "all", or another value that `train_only` accepts.
        optimizer: "adam" as in the paper, "sgd-foreach" or "sgd-fused".
        channels_last: whether images and the weights of convolutions are channels-last in memory.
        bf16: whether forward passes run under autocast to bfloat16.
        views: the rows of each example. Plain training takes them as examples of their own.
    """

    model: str
    data: str
    batch: int
    trained: str = "all"
    optimizer: str = "adam"
    channels_last: bool = False
    bf16: bool = False
    views: int = 1

    @property
    def key(self) -> str:
        """A name for files. It does not include optimizer and layout."""
        part = "" if self.trained == "all" else f"/{self.trained}"
        views = "" if self.views == 1 else f"/{self.views} views"
        return f"{self.model}/{self.data}/{self.batch}{part}{views}{'/bf16' if self.bf16 else ''}"

    @property
    def depth(self) -> int:
        """The number of hidden layers that the network's name ends with."""
        return int(self.model.rpartition("-")[2])

    @property
    def image_size(self) -> int:
        """Height and width of the images."""
        shape = shape_of(self.data)
        return shape.size if isinstance(shape, Images) else 0


@dataclass
class Workload:
    """A fresh model and a synthetic data set, both on the device."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    batch: int
    optimizer_name: str = "adam"
    bf16: bool = False
    views: int = 1

    @property
    def dataset(self) -> TensorDataset:
        """All rows."""
        return TensorDataset(self.inputs, self.targets)

    def optimizer(self) -> torch.optim.Optimizer:
        """A fresh optimizer over the trained parameters, with the paper's step size."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        return _OPTIMIZERS[self.optimizer_name](trained, lr=LEARNING_RATE)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless shuffled epochs, with all views."""
        while True:
            order = torch.randperm(len(self.inputs), device=self.inputs.device)
            for rows in torch.split(order, self.batch):
                rows = rows if self.views == 1 else rows.repeat_interleave(self.views)
                yield self.inputs[rows], self.targets[rows]

    def autocast(self) -> AbstractContextManager[object]:
        """The context of forward passes."""
        return torch.autocast(self.inputs.device.type, torch.bfloat16, enabled=self.bf16)

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """A forward pass: one loss per row."""
        with self.autocast():
            return losses_of(self.model(x), y)


def make_workload(setting: Setting, device: torch.device, seed: int) -> Workload:
    """Model and data of a setting, deterministic in the seed."""
    torch.manual_seed(seed)
    shape = shape_of(setting.data)
    with device:  # drawn where they are used: a large model would take seconds on the CPU
        model = train_only(build(setting.model, shape), setting.trained)
        inputs, targets = shape.draw(BATCHES * setting.batch)
    if setting.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs = inputs.to(memory_format=torch.channels_last)
    return Workload(model, inputs, targets, setting.batch, setting.optimizer, setting.bf16, setting.views)


def losses_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy, one value per example: the mean over positions if there are several."""
    losses = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")
    return losses.view_as(targets).mean(1) if targets.dim() > 1 else losses
