"""Neighbouring batches, and how far one example moves a clipped sum.

A batch holds the inputs of a case and a factor on the loss of each example. The factor
belongs to the example like its inputs, and sets the size of its gradient for every model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clipwise.clipping import Clipper, PerExample
from clipwise.gradients import FallbackWarning
from clipwise.privacy import Adjacency
from tests.gradients.cases import losses
from tests.sites import site

# An adversary's changes of one example's floating-point inputs.
DISTORTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "outlier": lambda x: x * 1e6,
    "huge": lambda x: x * 1e15,
    "overflowing": lambda x: x * 1e30,
    "tiny": lambda x: x * 1e-30,
    "denormal": lambda x: x * 1e-41,
    "zero": torch.zeros_like,
    "coherent": torch.ones_like,
    "coherent outlier": lambda x: torch.full_like(x, 1e3),
    "cancelling": lambda x: x * _alternating(x),
    "inf": lambda x: torch.full_like(x, torch.inf),
    "some inf": lambda x: x.clone().index_fill_(x.dim() - 1, torch.tensor([0, 1]), torch.inf),
    "nan": lambda x: torch.full_like(x, torch.nan),
}

# Factors on its loss.
FACTORS = (1.0, -1.0, 0.0, 1e6, 1e15, 1e30, 1e-30, 1e-42, float("inf"), float("nan"))


def _alternating(x: Tensor) -> Tensor:
    """+1 and -1 along the first axis of one example: neighbouring positions cancel."""
    signs = 1 - 2 * (torch.arange(x.shape[0], dtype=x.dtype) % 2)
    return signs.view(-1, *[1] * (x.dim() - 1))


@dataclass(frozen=True)
class Batch:
    inputs: tuple[Tensor, ...]
    factors: Tensor

    def __len__(self) -> int:
        return len(self.factors)

    def distorted(self, example: int, distortion: str, factor: float) -> Batch:
        """Return the batch with one example changed by an adversary."""

        def change(x: Tensor) -> Tensor:
            if not x.is_floating_point():
                return x
            x = x.clone()
            x[example] = DISTORTIONS[distortion](x[example])
            return x

        factors = self.factors.clone()
        factors[example] = factor
        return Batch(tuple(map(change, self.inputs)), factors)

    def without(self, example: int) -> Batch:
        left = [i for i in range(len(self)) if i != example]
        return Batch(tuple(x[left] for x in self.inputs), self.factors[left])

    def piece(self, rows: slice) -> Batch:
        return Batch(tuple(x[rows] for x in self.inputs), self.factors[rows])


def attach(model: nn.Module, strategy: PerExample, adjacency: Adjacency = Adjacency.ZERO_OUT) -> Clipper:
    return strategy.attach(site(model, adjacency))


def clipped_sum(clipper: Clipper, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        return clipper.clipped_sum(losses(model, batch.inputs) * batch.factors)


def excess(clipper: Clipper, one: dict[str, Tensor], other: dict[str, Tensor], adjacency: Adjacency) -> float:
    """Return the largest movement of a part, over its stated sensitivity under this adjacency."""
    factor = 2.0 if adjacency is Adjacency.REPLACE_ONE else 1.0
    return max(
        distance({n: one[n] for n in b.parameters}, {n: other[n] for n in b.parameters}) / (factor * b.sensitivity)
        for b in clipper.bounds
    )


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the distance in float64; infinite if a value is not finite."""
    squares = sum(float((one[n].double() - other[n].double()).square().sum()) for n in one)
    return squares**0.5 if squares == squares else float("inf")
