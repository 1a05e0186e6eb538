"""Bounds of what moves, adds, joins, scales or drops numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clipwise.lipschitz.norms import frobenius_norms
from clipwise.lipschitz.reach import Reach
from clipwise.lipschitz.rule import Effort, Measurements, Norms, Rounding, Rule


class MoveRule(Rule):
    """Flatten, reshape, permute, or take a part: every number goes to one place at most."""

    def __init__(self, out: Sequence[int], keeps_rows: bool = False) -> None:
        self.out, self.keeps_rows = tuple(out), keeps_rows

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        (x,) = reaches
        return Reach.of(self.out, x.norm, x.row if self.keeps_rows else math.inf, x.entry)

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        return (1.0,)


class ScaleRule(Rule):
    """c x + d for public numbers c and d, or a random mask times c."""

    def __init__(self, factor: float, rounding: Rounding, shift: float = 0.0) -> None:
        self.factor = abs(factor) * (1 + rounding.of_elements)
        self.shift = abs(shift) * (1 + rounding.of_elements)

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        (x,) = reaches
        last = x.shape[-1] if x.shape else 1
        return Reach.of(
            x.shape,
            self.factor * x.norm + math.sqrt(x.size) * self.shift,
            self.factor * x.row + math.sqrt(last) * self.shift,
            self.factor * x.entry + self.shift,
        )

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        return (self.factor,)


class DropoutRule(Rule):
    """In training, what is kept is multiplied by 1 / (1 - p). The rate is read when it is needed: it may be changed."""

    def __init__(self, module: Any, rounding: Rounding) -> None:
        self.module, self.rounding = module, rounding

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        (x,), (gain,) = reaches, self.gains(reaches, norms)
        return Reach.of(x.shape, gain * x.norm, gain * x.row, gain * x.entry)

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        return (dropped(self.module.p) * (1 + self.rounding.of_elements),)


class SumRule(Rule):
    """x + y or x - y. What is broadcast r times is sqrt(r) times as long, and gets r gradients."""

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
    """x * y, number by number: each is the other's slope. Of what is broadcast r times, |dx_j| <= |g| |y over j|."""

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
        x, y = reaches
        return tuple(
            slack * min(self._whole(other), _times(self.out, one) * other.entry)
            for one, other in ((x, y), (y, x))
        )

    def _whole(self, x: Reach) -> float:
        return _times(self.out, x) * x.norm


class JoinRule(Rule):
    """Concatenation: |y|^2 = sum |x_i|^2, and each input gets its own piece of the gradient.

    `lipschitz.bounds` knows that pieces of one gradient share its length.
    """

    def __init__(self, out: Sequence[int], along_rows: bool) -> None:
        self.out, self.along_rows = tuple(out), along_rows

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        rows = [x.row for x in reaches]
        row = math.hypot(*rows) if self.along_rows else max(rows)
        return Reach.of(self.out, math.hypot(*(x.norm for x in reaches)), row, max(x.entry for x in reaches))

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        return (1.0,) * len(reaches)


class ParameterRule(Rule):
    """A parameter, or a buffer, that the model uses by itself."""

    def __init__(self, tensor: Tensor, shape: Sequence[int]) -> None:
        self.tensor, self.shape = tensor, tuple(shape)

    def measured(self, effort: Effort) -> Measurements:
        flat = self.tensor.detach().reshape(1, -1)
        return {"norm": frobenius_norms(flat), "entry": flat.double().abs().amax()}

    def allowed(self, limit: float) -> dict[str, float]:
        return {"norm": limit, "entry": limit}

    def limited(self, effort: Effort) -> Measurements:
        return {"": self.measured(effort)["norm"]} if isinstance(self.tensor, torch.nn.Parameter) else {}

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        return Reach.of(self.shape, norm=norms["norm"], entry=norms["entry"])

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        return ()

    def parameter_gains(self, reaches: Sequence[Reach], norms: Norms) -> dict[str, float]:
        return {"": 1.0} if isinstance(self.tensor, torch.nn.Parameter) else {}


def dropped(p: float) -> float:
    """By what dropout multiplies the numbers that it keeps in training."""
    return 1 / (1 - p) if p < 1 else 1.0


def _times(out: Sequence[int], x: Reach) -> float:
    return math.sqrt(math.prod(out) / x.size) if x.size else 1.0


def _row(out: Sequence[int], x: Reach) -> float:
    """x.row after broadcasting: along the last dimension a single number is repeated."""
    last = x.shape[-1] if x.shape else 1
    wanted = out[-1] if out else 1
    return x.row if last == wanted else math.sqrt(wanted) * x.entry
