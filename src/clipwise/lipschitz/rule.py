"""The interface of a rule, which bounds one operation, and the error for an operation without a rule."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from clipwise.errors import UnsupportedModelError
from clipwise.gradients.precision import IEEE, Arithmetic
from clipwise.lipschitz.matrix_norms import Wanted

# How the norms of the weights are computed, from fastest to tightest.
Effort = Literal["spectral", "tight"]
EFFORTS: tuple[Effort, ...] = ("spectral", "tight")

Shape = tuple[int, ...]  # of one example's value, without the batch dimension
Norms = Mapping[str, float]  # measured norms of an operation's parameters
Measurements = dict[str, Wanted]  # norms to measure


@dataclass(frozen=True)
class Reach:
    """Bounds on a value of the network that hold for any example."""

    shape: Shape
    norm: float  # the L2 norm of the whole value
    row: float  # the L2 norm along the last dimension, at any position
    entry: float  # the absolute value of any entry

    @classmethod
    def of(cls, shape: Sequence[int], norm: float = math.inf, row: float = math.inf, entry: float = math.inf) -> Reach:
        """Complete the given bounds: entry <= row <= norm <= sqrt(rows) row, row <= sqrt(d) entry."""
        entry = min(entry, row, norm)
        row = min(row, norm, math.sqrt(shape[-1] if shape else 1) * entry)
        norm = min(norm, math.sqrt(math.prod(shape[:-1])) * row)
        return cls(tuple(shape), norm, row, min(entry, row))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """The number of positions: the product of all dimensions but the last."""
        return math.prod(self.shape[:-1])


@dataclass(frozen=True)
class Rounding:
    """Rounding error bounds for the arithmetic of training."""

    unit: float  # the distance from 1 to the next number in the network's dtype
    arithmetic: Arithmetic = IEEE  # of products

    def of_sum(self, terms: int) -> float:
        """The error of a sum of products, relative to sum |a| |b|, in any order: gamma_n = n u / (1 - n u)."""
        u = min(4 * (terms + 8) * self.unit, 0.5)  # 4: for the transforms of blocked and Winograd convolutions
        return u / (1 - u) + self.arithmetic.operand_error

    @property
    def of_elements(self) -> float:
        """The relative error of one elementwise operation; functions such as tanh err by a few units."""
        return 16 * self.unit


class Rule(ABC):
    """The bounds of one operation, for one example, in three methods:

    - `largest`: a bound on the output, from bounds on the inputs;
    - `gains`: the largest factor from the output's gradient to that of each input, |J| in the spectral norm;
    - `parameter_gains`: the same for each parameter.

    They hold for every input within the given reach, in the arithmetic of training. A rule with parameters also has
    `measured`, `allowed` and `limited`.
    """

    rounding: Rounding
    has_lengths: bool = False  # whether it has `lengths` and `scaled`, so that one measurement serves clip and bounds
    splits_gradient: bool = False  # whether each input gets its own part of the gradient

    def measured(self, effort: Effort) -> Measurements:
        """Norms of the current parameters: float64 scalars on their device, or `Wanted` norms."""
        return {}

    def joined(self, found: Norms) -> dict[str, float]:
        """Norms for the methods below, from the measured ones."""
        return dict(found)

    def allowed(self, limit: float) -> dict[str, float]:
        """The largest possible norms of parameters that are clipped to `limit`."""
        return {}

    def limited(self, norm: str) -> Measurements:
        """The norm ("spectral" or "frobenius") of each parameter that weight clipping limits; maybe one per row."""
        return {}

    def lengths(self, norms: Norms, norm: str) -> dict[str, float]:
        """What `limited` returns, from the measured norms."""
        raise NotImplementedError

    def scaled(self, norms: Norms, factors: Mapping[str, float], error: float) -> dict[str, float]:
        """Upper bounds on the norms of parameters times factors, with a relative error per entry."""
        raise NotImplementedError

    @abstractmethod
    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        """A bound on the output."""

    @abstractmethod
    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        """The largest factor from the gradient at the output to that at each input."""

    def parameter_gains(self, reaches: Sequence[Reach], norms: Norms) -> dict[str, float]:
        """The largest factor from the gradient at the output to that of each parameter of the module."""
        return {}


@dataclass(frozen=True)
class PlainRule(Rule):
    """An operation on one value, without parameters."""

    bound: Callable[[Reach], Reach]  # for the output
    gain: float  # |J|
    is_view: bool = False  # whether the output may share the memory of the input

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        return self.bound(reaches[0])

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        return (self.gain,)


def fixed_gain_rule(out: Sequence[int], gain: float, entry: float = 1.0, is_view: bool = False) -> Rule:
    """A map with a known norm: |y| <= gain |x|, and no entry grows by more than the factor `entry`."""
    return PlainRule(lambda x: Reach.of(out, norm=gain * x.norm, entry=entry * x.entry), gain, is_view)


def move_rule(out: Sequence[int]) -> Rule:
    """Flatten, reshape, permute, pad or slice: each entry is used at most once."""
    return fixed_gain_rule(out, 1.0, is_view=True)


def pad_rule(call: Call, pad: Sequence[int]) -> Rule:
    """Padding with zeros, not of the batch dimension: (1, -1) would shift the examples by one."""
    if len(pad) > 2 * len(call.shapes[0]):
        remedy = "give two numbers for each dimension of an example, and no more"
        raise call.refusal(f"it pads the dimension that holds the examples of the batch: {remedy}")
    return move_rule(call.out)


DOT_PRODUCTS = "dot-product attention has no bounded slope: use another strategy"
UNKNOWN = "no bound is known for it: use an operation that has one, or another strategy"


def refusal(name: str, what: Any, reason: str) -> UnsupportedModelError:
    """The error for an operation without a bound: a module, a function or a method name."""
    if isinstance(what, nn.Module):
        called = f"{name or 'model'!r} ({type(what).__name__})"
    else:
        called = f"{name!r} ({what if isinstance(what, str) else getattr(what, '__name__', what)})"
    return UnsupportedModelError(f"Lipschitz bounds: {called}: {reason}.")


@dataclass(frozen=True)
class Call:
    """A call of a module, a function or a method, from which its rule is built."""

    name: str
    target: Any  # the module, the function or the name of the method
    shapes: Sequence[Shape]  # of one example's operands
    out: Shape  # of one example's result
    rounding: Rounding
    arguments: tuple[Any, ...] = ()  # of a function or method, with None for tensors
    options: Mapping[str, Any] = field(default_factory=dict)
    has_weights: bool = False  # whether an operand is a parameter or buffer of the model

    def option(self, name: str, position: int, default: Any = None) -> Any:
        """An argument, given by name or by position."""
        by_place = self.arguments[position] if len(self.arguments) > position else default
        return self.options.get(name, by_place)

    def refusal(self, reason: str) -> UnsupportedModelError:
        return refusal(self.name, self.target, reason)

    def own_dimension(self, dim: int, of: Shape | None = None) -> int:
        """Convert a dimension of the batch to one of an example; refuse the batch dimension."""
        ndim = len(self.out if of is None else of)
        found = dim if dim >= 0 else dim + ndim + 1
        if not 1 <= found <= ndim:
            remedy = "each example must be processed independently"
            raise self.refusal(f"it works along dimension {dim}, which holds the examples of the batch: {remedy}")
        return found - 1


Build = Callable[[Call], Rule]  # a rule class, or a function that builds a rule
