"""Bounds of moves, sums, products and concatenations, and of parameters that a model uses directly."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from clipwise.lipschitz.matrix_norms import frobenius_norms
from clipwise.lipschitz.rule import Effort, Measurements, Norms, Reach, Rounding, Rule


class FixedGainRule(Rule):
    """A map with a known norm: |y| <= gain |x|, and no entry grows by more than the factor `entry`."""

    def __init__(self, out: Sequence[int], gain: float, entry: float = 1.0) -> None:
        self.out, self.gain, self.entry = tuple(out), gain, entry

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        (x,) = reaches
        return Reach.of(self.out, norm=self.gain * x.norm, entry=self.entry * x.entry)

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        return (self.gain,)


class MoveRule(FixedGainRule):
    """Flatten, reshape, permute or slice: each entry is used at most once. `is_same`: the value is unchanged."""

    def __init__(self, out: Sequence[int], is_same: bool = False) -> None:
        super().__init__(out, gain=1.0)
        self.is_same = is_same

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        return reaches[0] if self.is_same else super().largest(reaches, norms)


class SumRule(Rule):
    """x + y or x - y. A value broadcast r times has sqrt(r) times the norm, and receives r gradients."""

    def __init__(self, out: Sequence[int], rounding: Rounding) -> None:
        self.out, self.rounding = tuple(out), rounding

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        slack = 1 + self.rounding.of_elements
        return Reach.of(
            self.out,
            slack * sum(_times(self.out, x) * x.norm for x in reaches),
            slack * sum(_row(self.out, x) for x in reaches),
            slack * sum(x.entry for x in reaches),
        )

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        slack = 1 + self.rounding.of_sum(math.prod(self.out))
        return tuple(slack * _times(self.out, x) for x in reaches)


class ProductRule(Rule):
    """x * y, elementwise: each is the other's slope. If x is broadcast, |dx_j| <= |g| |y over j|."""

    def __init__(self, out: Sequence[int], rounding: Rounding) -> None:
        self.out, self.rounding = tuple(out), rounding

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        x, y = reaches
        slack = 1 + self.rounding.of_elements
        return Reach.of(
            self.out,
            slack * min(self._whole(x) * y.entry, self._whole(y) * x.entry),
            slack * min(_row(self.out, x) * y.entry, _row(self.out, y) * x.entry),
            slack * x.entry * y.entry,
        )

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        slack = 1 + self.rounding.of_sum(math.prod(self.out))
        return tuple(
            slack * min(self._whole(other), _times(self.out, one) * other.entry)
            for one, other in (reaches, reversed(reaches))
        )

    def _whole(self, x: Reach) -> float:
        return _times(self.out, x) * x.norm


class JoinRule(Rule):
    """Concatenation: |y|^2 = sum |x_i|^2, and each input gets its own part of the gradient."""

    splits_gradient = True

    def __init__(self, out: Sequence[int], along_rows: bool) -> None:
        self.out, self.along_rows = tuple(out), along_rows

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

    def limited(self, effort: Effort) -> Measurements:
        return {"": self.measured(effort)["norm"]} if self.is_parameter else {}

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        return Reach.of(self.shape, norm=norms["norm"], entry=norms["entry"])

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        return ()

    def parameter_gains(self, reaches: Sequence[Reach], norms: Norms) -> dict[str, float]:
        return {"": 1.0} if self.is_parameter else {}


def _times(out: Sequence[int], x: Reach) -> float:
    """The factor by which broadcasting increases the norm of x."""
    return math.sqrt(math.prod(out) / x.size) if x.size else 1.0


def _row(out: Sequence[int], x: Reach) -> float:
    """x.row after broadcasting, which may repeat an entry along the last dimension."""
    last = x.shape[-1] if x.shape else 1
    wanted = out[-1] if out else 1
    return x.row if last == wanted else math.sqrt(wanted) * x.entry
