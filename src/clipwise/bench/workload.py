"""A network and its data: what one measurement runs on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise.bench.networks import build
from clipwise.bench.shapes import Images, shape_of

LEARNING_RATE = 1e-3
BATCHES = 4  # in the synthetic data set: an epoch is so many steps


@dataclass(frozen=True)
class Setting:
    """What is measured: a network, its data and a batch size."""

    model: str
    data: str
    batch: int

    @property
    def key(self) -> str:
        """A name for files."""
        return f"{self.model}/{self.data}/{self.batch}"

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
    """A fresh model on its device, and a synthetic data set beside it."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    batch: int

    @property
    def dataset(self) -> TensorDataset:
        """All rows."""
        return TensorDataset(self.inputs, self.targets)

    def optimizer(self) -> torch.optim.Optimizer:
        """Adam with the paper's step size, over what is trained."""
        return torch.optim.Adam([p for p in self.model.parameters() if p.requires_grad], lr=LEARNING_RATE)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled epochs without end."""
        while True:
            order = torch.randperm(len(self.inputs), device=self.inputs.device)
            for rows in torch.split(order, self.batch):
                yield self.inputs[rows], self.targets[rows]


def make_workload(setting: Setting, device: torch.device, seed: int) -> Workload:
    """Model and data of a setting; the same seed gives the same ones."""
    torch.manual_seed(seed)
    shape = shape_of(setting.data)
    model = build(setting.model, shape).to(device)
    inputs, targets = shape.draw(BATCHES * setting.batch)
    return Workload(model, inputs.to(device), targets.to(device), setting.batch)


def losses_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy, one value an example: the mean over its positions where there are several."""
    losses = F.cross_entropy(outputs.movedim(-1, 1), targets, reduction="none")
    return losses.flatten(1).mean(1) if losses.dim() > 1 else losses
