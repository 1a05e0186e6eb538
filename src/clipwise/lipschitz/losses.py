"""Losses with a bounded slope: one loss an example, and the largest norm of its gradient at the model's output."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from clipwise.errors import ConfigurationError
from clipwise.validation.arguments import number, one_of

KINDS = ("all-pairs", "largest", "one-against-all")


class BoundedLoss(ABC):
    """A loss that is called with outputs and targets, and knows its constant."""

    @abstractmethod
    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One loss an example."""

    @abstractmethod
    def constant(self, shape: Sequence[int]) -> float:
        """The largest norm of an example's gradient at its output, which has this shape."""


@dataclass(frozen=True)
class SoftmaxCrossEntropy(BoundedLoss):
    """-log softmax(z / tau)_y: |p - e_y| / tau <= sqrt(2) / tau. A high temperature tau means small gradients."""

    temperature: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", number("temperature", self.temperature, above=0))

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs / self.temperature, targets, reduction="none")
        return _per_example(losses)

    def constant(self, shape: Sequence[int]) -> float:
        # (classes, positions...): each position has its own loss.
        return math.sqrt(2 * math.prod(shape[1:])) / self.temperature


@dataclass(frozen=True)
class CosineSimilarity(BoundedLoss):
    """1 - z y / (max(|z|, floor) |y|): the slope is at most 1 / floor. Without a floor it has no bound at z = 0."""

    floor: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "floor", number("floor", self.floor, above=0))

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        _require_same_shape(self, outputs, targets)
        z, y = outputs.flatten(1), targets.flatten(1)
        # The floor comes before the root, whose slope at 0 is infinite.
        lengths = z.square().sum(1).clamp(min=self.floor**2).sqrt()
        return 1 - (z * F.normalize(y, dim=1)).sum(1) / lengths

    def constant(self, shape: Sequence[int]) -> float:
        return 1 / self.floor


@dataclass(frozen=True)
class MulticlassHinge(BoundedLoss):
    """The hinge over c classes, in one of three forms.

    Args:
        kind: "all-pairs": sum_{j != y} max(0, m - z_y + z_j), whose slope is sqrt(c (c - 1)): all c - 1 others pull at
            z_y. "largest": only the worst of them, sqrt(2). "one-against-all": sum_j max(0, m - t_j z_j) with
            t_j = 1 for the class and -1 for others, sqrt(c).
        margin: m.
    """

    kind: str = "largest"
    margin: float = 1.0

    def __post_init__(self) -> None:
        one_of("kind", self.kind, KINDS)
        if not (isinstance(self.margin, (int, float)) and math.isfinite(self.margin)):
            raise ConfigurationError(f"margin must be a finite number, not {self.margin!r}.")

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        is_class = F.one_hot(targets, outputs.shape[1]).bool()
        if self.kind == "one-against-all":
            return (self.margin - torch.where(is_class, outputs, -outputs)).relu().sum(1)
        own = outputs.gather(1, targets.unsqueeze(1))
        others = torch.where(is_class, 0, (self.margin - own + outputs).relu())
        return others.sum(1) if self.kind == "all-pairs" else others.amax(1)

    def constant(self, shape: Sequence[int]) -> float:
        if len(shape) != 1:
            raise ConfigurationError(
                f"MulticlassHinge takes outputs of the shape (examples, classes), and an example's outputs have the "
                f"shape {tuple(shape)}: flatten them, or take SoftmaxCrossEntropy, which knows positions."
            )
        (classes,) = shape
        if self.kind == "all-pairs":
            return math.sqrt(classes * (classes - 1))
        return math.sqrt(2) if self.kind == "largest" else math.sqrt(classes)


@dataclass(frozen=True)
class Huber(BoundedLoss):
    """sum over n outputs of e^2 / 2 up to delta, then delta (|e| - delta / 2): a slope of sqrt(n) delta."""

    delta: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "delta", number("delta", self.delta, above=0))

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        _require_same_shape(self, outputs, targets)
        losses = F.huber_loss(outputs, targets, reduction="none", delta=self.delta)
        return _per_example(losses)

    def constant(self, shape: Sequence[int]) -> float:
        return math.sqrt(math.prod(shape)) * self.delta


@dataclass(frozen=True)
class Logistic(BoundedLoss):
    """log(1 + e^z) - y z over n outputs, for labels y in [0, 1]: |sigmoid(z) - y| <= 1, so sqrt(n)."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        _require_same_shape(self, outputs, targets)
        losses = F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none")
        return _per_example(losses)

    def constant(self, shape: Sequence[int]) -> float:
        return math.sqrt(math.prod(shape))


def require_bounded(loss: object) -> None:
    """Refuse a loss that does not know its constant."""
    if not isinstance(loss, BoundedLoss):
        raise ConfigurationError(
            "loss must be a clipwise.lipschitz.BoundedLoss, which knows its constant, not "
            f"{type(loss).__name__}: for instance lipschitz.SoftmaxCrossEntropy(temperature=2.0)."
        )


def constant_of(loss: BoundedLoss, shape: Sequence[int]) -> float:
    """The loss's constant for outputs of this shape, or an error if that is none."""
    return number(f"{type(loss).__name__}.constant({tuple(shape)})", loss.constant(shape), above=0)


def clip_output_gradients(gradients: Tensor, constant: float) -> Tensor:
    """Each example's gradient at the output, at most `constant` long; one that is not finite counts as 0.

    So does one that is 2^126 times as long: float32 would round its scale, perhaps up.

    With this a wrong or scaled loss cannot break a bound. A loss that keeps its constant is left as it is.
    """
    rows = gradients.flatten(1) if gradients.ndim > 1 else gradients.unsqueeze(1)
    norms_B = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    if norms_B.device.type == "cpu" and bool((norms_B <= constant).all()):
        return gradients  # as it should be; elsewhere the answer would have to be waited for
    # A loss at its constant may pass it by rounding; the bounds allow for that much anyway.
    scales_B = (constant / norms_B).clamp(max=1)
    shape = (-1, *[1] * (gradients.ndim - 1))
    good_B = torch.isfinite(norms_B) & (scales_B >= torch.finfo(gradients.dtype).tiny)
    return torch.where(good_B.view(shape), gradients * scales_B.to(gradients.dtype).view(shape), 0)


def _per_example(losses: Tensor) -> Tensor:
    return losses.flatten(1).sum(1) if losses.ndim > 1 else losses


def _require_same_shape(loss: BoundedLoss, outputs: Tensor, targets: Tensor) -> None:
    """Otherwise torch repeats one of them, and every example meets all targets."""
    if outputs.shape != targets.shape:
        raise ConfigurationError(
            f"{type(loss).__name__}: outputs and targets have different shapes, and each output needs a target of its "
            "own: give targets.view_as(outputs)."
        )
