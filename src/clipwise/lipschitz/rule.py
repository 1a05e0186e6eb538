"""What a rule, the bounds of one operation, consists of; and how an operation without a rule is refused."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from clipwise.errors import UnsupportedModelError
from clipwise.gradients.precision import IEEE, Arithmetic
from clipwise.lipschitz.batched_norms import Wanted

# How much work the norms of the weights may cost: the larger, the smaller the bounds.
Effort = Literal["frobenius", "spectral", "tight"]
EFFORTS: tuple[Effort, ...] = ("frobenius", "spectral", "tight")

Shape = tuple[int, ...]  # of one example's value, without the batch
Norms = Mapping[str, float]  # what was measured of an operation's parameters
Measurements = dict[str, Tensor | Wanted]  # what is to be measured of them, all together


@dataclass(frozen=True)
class Reach:
    """How large a value can be for any example, at one place of the network.

    Args:
        shape: of one example's value, without the batch.
        norm: L2, of the whole value.
        row: L2, along the last dimension, at any position.
        entry: any single number.
    """

    shape: Shape
    norm: float
    row: float
    entry: float

    @classmethod
    def of(
        cls, shape: Sequence[int], norm: float = math.inf, row: float = math.inf, entry: float = math.inf
    ) -> Reach:
        """From what is known, with what follows: entry <= row <= norm <= sqrt(rows) row, row <= sqrt(d) entry."""
        entry = min(entry, row, norm)
        row = min(row, norm, math.sqrt(shape[-1] if shape else 1) * entry)
        norm = min(norm, math.sqrt(math.prod(shape[:-1])) * row)
        return cls(tuple(shape), norm, row, min(entry, row))

    @property
    def size(self) -> int:
        """How many numbers one example has here."""
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """How many positions: all dimensions but the last."""
        return math.prod(self.shape[:-1])


@dataclass(frozen=True)
class Rounding:
    """How far the arithmetic of training can err.

    Args:
        unit: the distance from 1 to the next number of the type that the network computes in.
        arithmetic: how its products are formed.
    """

    unit: float
    arithmetic: Arithmetic = IEEE

    def of_sum(self, terms: int) -> float:
        """Of a sum of products, relative to its mass sum |a| |b|, in any order: gamma_n = n u / (1 - n u)."""
        u = min(4 * (terms + 8) * self.unit, 0.5)  # 4: blocked and Winograd convolutions transform first
        return u / (1 - u) + self.arithmetic.operand_error

    @property
    def of_elements(self) -> float:
        """Of one elementwise operation; functions such as tanh are right up to a few units."""
        return 16 * self.unit


class Rule(ABC):
    """The bounds of one operation, for one example. Three methods give all of them:

    - `largest`: how large its output can be, given how large its inputs can be;
    - `gains`: by how much a gradient can grow on its way back to each input, |J| in the spectral norm;
    - `parameter_gains`: the same on the way to each parameter.

    All hold for every input within the given reach, in the arithmetic of training. A rule with parameters also has
    `measured`, `allowed` and `limited`.
    """

    rounding: Rounding
    has_lengths: bool = (
        False  # whether it has `lengths` and `scaled`: one measurement then serves clip and bounds
    )
    splits_gradient: bool = False  # whether its inputs share one gradient, each with a piece of its own

    def measured(self, effort: Effort) -> Measurements:
        """Norms of the current parameters: float64 numbers on their device, or norms that are wanted."""
        return {}

    def joined(self, found: Norms) -> dict[str, float]:
        """Norms for the methods below, from what was measured."""
        return dict(found)

    def allowed(self, limit: float) -> dict[str, float]:
        """The same norms for parameters that are only known to be clipped to `limit`."""
        return {}

    def limited(self, effort: Effort) -> Measurements:
        """For each parameter the norm that weight clipping limits; as a tensor it may have one for each row."""
        return {}

    def lengths(self, norms: Norms, norm: str) -> dict[str, float]:
        """The norms that weight clipping limits ("spectral" or "frobenius"), out of the measured ones."""
        raise NotImplementedError

    def scaled(self, norms: Norms, factors: Mapping[str, float], error: float) -> dict[str, float]:
        """At least the norms after parameters were multiplied by factors, each number up to a relative error."""
        raise NotImplementedError

    @abstractmethod
    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        """How large the output can be."""

    @abstractmethod
    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        """The most by which a gradient at the output is multiplied at each input."""

    def parameter_gains(self, reaches: Sequence[Reach], norms: Norms) -> dict[str, float]:
        """The most by which a gradient at the output is multiplied at each parameter of the module."""
        return {}


DOT_PRODUCTS = (
    "attention by dot products has no bounded slope: take clipwise.layers.L2Attention, by distances"
)
UNKNOWN = "no bound is known for it: take an operation that has one, or another strategy"


def refusal(name: str, what: Any, reason: str) -> UnsupportedModelError:
    """The error for an operation without a bound: a module, a function or a name."""
    if isinstance(what, nn.Module):
        called = f"{name or 'model'!r} ({type(what).__name__})"
    else:
        called = f"{name!r} ({what if isinstance(what, str) else getattr(what, '__name__', what)})"
    return UnsupportedModelError(f"Lipschitz bounds: {called}: {reason}.")


@dataclass(frozen=True)
class Call:
    """A call of a module, a function or a method, from which its rule is made.

    Args:
        name: how a message calls it.
        target: the module, the function, or the name of the method.
        shapes: of one example's operands.
        out: of one example's result.
        rounding: the arithmetic of training.
        arguments, options: of a function or method, with None in the place of tensors.
        has_weights: whether it takes a tensor of the model, beside values.
    """

    name: str
    target: Any
    shapes: Sequence[Shape]
    out: Shape
    rounding: Rounding
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    has_weights: bool = False

    def option(self, name: str, position: int, default: Any = None) -> Any:
        """An argument given by name or by place."""
        by_place = self.arguments[position] if len(self.arguments) > position else default
        return self.options.get(name, by_place)

    def refusal(self, reason: str) -> UnsupportedModelError:
        """The error for this call."""
        return refusal(self.name, self.target, reason)

    def own_dimension(self, dim: int, of: Shape | None = None) -> int:
        """A dimension of the batch as one of an example; that of the examples is refused."""
        ndim = len(self.out if of is None else of)
        found = dim if dim >= 0 else dim + ndim + 1
        if not 1 <= found <= ndim:
            raise UnsupportedModelError(
                f"Lipschitz bounds: {self.name!r} works along dimension {dim}, which holds the examples of the batch: "
                "each example must be treated by itself."
            )
        return found - 1

    def require_own_padding(self, pad: Sequence[int]) -> None:
        """Refuse padding of the dimension of the examples: (1, -1) there moves each to the next one's place."""
        if len(pad) > 2 * len(self.shapes[0]):
            raise UnsupportedModelError(
                f"Lipschitz bounds: {self.name!r} pads the dimension that holds the examples of the batch: give two "
                "numbers for each dimension of an example, and no more."
            )


Build = Callable[[Call], Rule]  # a rule's class, or a function that makes one
