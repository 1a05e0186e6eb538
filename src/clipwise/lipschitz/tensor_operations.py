"""Bounds of sums, products and concatenations, and of parameters that a model uses directly."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from clipwise.lipschitz.matrix_norms import frobenius_norms
from clipwise.lipschitz.rule import Call, Effort, Measurements, Norms, Reach, Rule


class BroadcastRule(Rule):
    """The base of x + y and x * y. A value broadcast r times has sqrt(r) times the norm, and receives r gradients."""

    def __init__(self, call: Call) -> None:
        self.out, self.rounding = call.out, call.rounding
        self.slack = 1 + call.rounding.of_elements  # of a value
        self.summing = 1 + call.rounding.of_sum(math.prod(call.out))  # of a gradient

    def _times(self, x: Reach) -> float:
        """The factor by which broadcasting increases the norm of x."""
        return math.sqrt(math.prod(self.out) / x.size) if x.size else 1.0

    def _whole(self, x: Reach) -> float:
        return self._times(x) * x.norm

    def _row(self, x: Reach) -> float:
        """x.row after broadcasting, which may repeat an entry along the last dimension."""
        last = x.shape[-1] if x.shape else 1
        wanted = self.out[-1] if self.out else 1
        return x.row if last == wanted else math.sqrt(wanted) * x.entry


class SumRule(BroadcastRule):
    """x + y or x - y."""

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        return Reach.of(
            self.out,
            self.slack * sum(map(self._whole, reaches)),
            self.slack * sum(map(self._row, reaches)),
            self.slack * sum(x.entry for x in reaches),
        )

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        return tuple(self.summing * self._times(x) for x in reaches)


class ProductRule(BroadcastRule):
    """x * y, elementwise: each is the other's slope. If x is broadcast, |dx_j| <= |g| |y over j|."""

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        x, y = reaches
        return Reach.of(
            self.out,
            self.slack * min(self._whole(x) * y.entry, self._whole(y) * x.entry),
            self.slack * min(self._row(x) * y.entry, self._row(y) * x.entry),
            self.slack * x.entry * y.entry,
        )

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        return tuple(
            self.summing * min(self._whole(other), self._times(one) * other.entry)
            for one, other in (reaches, reversed(reaches))
        )


class JoinRule(Rule):
    """Concatenation: |y|^2 = sum |x_i|^2, and each input gets its own part of the gradient."""

    splits_gradient = True

    def __init__(self, out: Sequence[int], along_rows: bool) -> None:
        self.out, self.along_rows = out, along_rows

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        rows = [x.row for x in reaches]
        row = math.hypot(*rows) if self.along_rows else max(rows)
        return Reach.of(self.out, math.hypot(*(x.norm for x in reaches)), row, max(x.entry for x in reaches))

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        return (1.0,) * len(reaches)


class ParameterRule(Rule):
    """A parameter or buffer that the model uses outside a module with a rule."""

    def __init__(self, tensor: Tensor, shape: Sequence[int]) -> None:
        self.tensor, self.shape = tensor, tuple(shape)
        self.is_parameter = isinstance(tensor, torch.nn.Parameter)

    def measured(self, effort: Effort) -> Measurements:
        flat = self.tensor.detach().reshape(1, -1)
        return {"norm": frobenius_norms(flat), "entry": flat.double().abs().amax()}

    def allowed(self, limit: float) -> dict[str, float]:
        return {"norm": limit, "entry": limit}

    def limited(self, norm: str) -> Measurements:
        return {"": self.measured("spectral")["norm"]} if self.is_parameter else {}

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        return Reach.of(self.shape, norm=norms["norm"], entry=norms["entry"])

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        return ()

    def parameter_gains(self, reaches: Sequence[Reach], norms: Norms) -> dict[str, float]:
        return {"": 1.0} if self.is_parameter else {}
