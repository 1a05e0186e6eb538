"""Losses per example with a bounded gradient norm at the model's output."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from clipwise.errors import ConfigurationError
from clipwise.layers.bounded import clip_rows, row_norms
from clipwise.validation.arguments import number


class BoundedLoss(ABC):
    """A loss of outputs and targets with a known gradient bound, its constant."""

    @abstractmethod
    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One loss per example."""

    @abstractmethod
    def constant(self, shape: Sequence[int]) -> float:
        """The largest norm of one example's gradient at the output, for an output of this shape."""


@dataclass(frozen=True)
class SoftmaxCrossEntropy(BoundedLoss):
    """-log softmax(z / tau)_y: |p - e_y| / tau <= sqrt(2) / tau. A higher temperature tau gives smaller gradients."""

    temperature: float = 1.0

    def __post_init__(self) -> None:
        _require_positive(self, "temperature")

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return _per_example(F.cross_entropy(outputs / self.temperature, targets, reduction="none"))

    def constant(self, shape: Sequence[int]) -> float:
        # (classes, positions...): each position has its own loss.
        return math.sqrt(2 * math.prod(shape[1:])) / self.temperature


@dataclass(frozen=True)
class CosineSimilarity(BoundedLoss):
    """1 - z y / (max(|z|, floor) |y|): the slope is at most 1 / floor. Without `floor` it is unbounded at z = 0."""

    floor: float

    def __post_init__(self) -> None:
        _require_positive(self, "floor")

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        _require_same_shape(self, outputs, targets)
        z, y = outputs.flatten(1), targets.flatten(1)
        # Clamp before the root, whose slope at 0 is infinite.
        lengths = z.square().sum(1).clamp(min=self.floor**2).sqrt()
        return 1 - (z * F.normalize(y, dim=1)).sum(1) / lengths

    def constant(self, shape: Sequence[int]) -> float:
        return 1 / self.floor


@dataclass(frozen=True)
class MulticlassHinge(BoundedLoss):
    """max_{j != y} max(0, m - z_y + z_j) for the margin m and the class y, with slope sqrt(2)."""

    margin: float = 1.0

    def __post_init__(self) -> None:
        number("margin", self.margin)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        is_class = F.one_hot(targets, outputs.shape[1]).bool()
        own = outputs.gather(1, targets.unsqueeze(1))
        return torch.where(is_class, 0, (self.margin - own + outputs).relu()).amax(1)

    def constant(self, shape: Sequence[int]) -> float:
        if len(shape) != 1:
            raise ConfigurationError(
                f"MulticlassHinge takes outputs of shape (examples, classes), and the outputs of one example have "
                f"shape {tuple(shape)}: flatten them, or use SoftmaxCrossEntropy, which supports positions."
            )
        return math.sqrt(2)


@dataclass(frozen=True)
class Huber(BoundedLoss):
    """The sum over n outputs of e^2 / 2 up to delta, then delta (|e| - delta / 2), with slope sqrt(n) delta."""

    delta: float = 1.0

    def __post_init__(self) -> None:
        _require_positive(self, "delta")

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        _require_same_shape(self, outputs, targets)
        return _per_example(F.huber_loss(outputs, targets, reduction="none", delta=self.delta))

    def constant(self, shape: Sequence[int]) -> float:
        return math.sqrt(math.prod(shape)) * self.delta


@dataclass(frozen=True)
class Logistic(BoundedLoss):
    """log(1 + e^z) - y z over n outputs, for labels y in [0, 1]: |sigmoid(z) - y| <= 1, so the slope is sqrt(n)."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        _require_same_shape(self, outputs, targets)
        losses = F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none")
        return _per_example(losses)

    def constant(self, shape: Sequence[int]) -> float:
        return math.sqrt(math.prod(shape))


def require_bounded(loss: object) -> None:
    """Refuse a loss that is not a `BoundedLoss`."""
    if not isinstance(loss, BoundedLoss):
        raise ConfigurationError(
            "loss must be a clipwise.lipschitz.BoundedLoss, which has a constant, not "
            f"{type(loss).__name__}: for example lipschitz.SoftmaxCrossEntropy(temperature=2.0)."
        )


def constant_of(loss: BoundedLoss, shape: Sequence[int]) -> float:
    """The validated constant of the loss for outputs of this shape."""
    return number(f"{type(loss).__name__}.constant({tuple(shape)})", loss.constant(shape), above=0)


def clip_output_gradients(gradients: Tensor, constant: float) -> Tensor:
    """Clip each example's gradient at the output to `constant`. A non-finite gradient becomes 0.

    So does one longer than 2^126 times `constant`, whose scale float32 would round, possibly up. With this clip a wrong
    or scaled loss cannot violate a bound. A loss within its constant is not changed.
    """
    norms_B = row_norms(gradients)
    if norms_B.device.type == "cpu" and bool((norms_B <= constant).all()):
        return gradients  # on other devices this check would synchronize
    # Rounding may exceed the constant slightly; the bounds allow for it.
    return clip_rows(gradients, norms_B, constant)[0]


def _require_positive(loss: BoundedLoss, name: str) -> None:
    object.__setattr__(loss, name, number(name, getattr(loss, name), above=0))


def _per_example(losses: Tensor) -> Tensor:
    return losses.flatten(1).sum(1) if losses.ndim > 1 else losses


def _require_same_shape(loss: BoundedLoss, outputs: Tensor, targets: Tensor) -> None:
    """Otherwise torch broadcasts, and every output is compared with all targets."""
    if outputs.shape != targets.shape:
        raise ConfigurationError(
            f"{type(loss).__name__}: outputs and targets have different shapes, and each output needs its own "
            "target: give targets.view_as(outputs)."
        )
