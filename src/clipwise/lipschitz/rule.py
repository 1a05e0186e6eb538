"""What a bound of one operation consists of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from clipwise.gradients.precision import IEEE, Arithmetic
from clipwise.lipschitz.measuring import Wanted
from clipwise.lipschitz.reach import Reach

# How much work the norms of the weights may cost: the larger, the smaller the bounds.
Effort = Literal["frobenius", "spectral", "tight"]
EFFORTS: tuple[Effort, ...] = ("frobenius", "spectral", "tight")

Norms = Mapping[str, float]  # what was measured of an operation's parameters
Measurements = dict[str, Tensor | Wanted]  # what is to be measured of them, all together


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
    """The bounds of one operation, for one example. Three methods say all:

    - `largest`: how large its output can be, given how large its inputs can be;
    - `gains`: by how much a gradient can grow on its way back to each input, |J| in the spectral norm;
    - `parameter_gains`: the same on the way to each parameter.

    All hold for every input within the given reach, in the arithmetic of training.
    """

    rounding: Rounding
    has_lengths: bool = (
        False  # whether `lengths` and `scaled` are there: then one measurement serves clip and bounds
    )

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
        """At least the norms after parameters were multiplied by these factors, each number up to a relative error."""
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
