"""The space of a search: ranges and lists."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clipwise.errors import ConfigurationError


@dataclass(frozen=True)
class Range:
    """All numbers from low to high; log-uniform if `log`; whole numbers if `whole`."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ConfigurationError(
                f"Range({self.low:g}, {self.high:g}) is empty: give two finite numbers, the smaller one first."
            )
        if self.log and self.low <= 0:
            raise ConfigurationError(f"Range({self.low:g}, {self.high:g}, log=True): low must be above 0.")
        if self.whole and math.ceil(self.low) > math.floor(self.high):
            raise ConfigurationError(
                f"Range({self.low:g}, {self.high:g}, whole=True) holds no whole number: give wider ends."
            )

    def at(self, u: float) -> float | int:
        """The number at the fraction u in [0, 1] of the range."""
        value: float
        if self.log:
            value = self.low * (self.high / self.low) ** float(u)
        else:
            value = self.low + (self.high - self.low) * u
        value = min(max(value, self.low), self.high)
        return round(value) if self.whole else value


@dataclass(frozen=True)
class Choice:
    """One of a list."""

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ConfigurationError("Choice(()) is empty: give at least one value.")

    def at(self, u: float) -> Any:
        """The value at the fraction u in [0, 1] of the list."""
        return self.values[min(int(u * len(self.values)), len(self.values) - 1)]


Dimension = Range | Choice
Space = Mapping[str, Dimension]


def point(space: Space, u: Sequence[float]) -> dict[str, Any]:
    """The point of a space at coordinates in [0, 1], one per dimension, in the order of the space."""
    return {name: dimension.at(at) for (name, dimension), at in zip(space.items(), u, strict=True)}


def described(space: Space) -> dict[str, dict[str, Any]]:
    """A space in plain types, for a file."""
    return {name: _described(dimension) for name, dimension in space.items()}


def _described(dimension: Dimension) -> dict[str, Any]:
    if isinstance(dimension, Choice):
        return {"values": [plain(value) for value in dimension.values]}
    low, high = float(dimension.low), float(dimension.high)
    return {"low": low, "high": high, "log": bool(dimension.log), "whole": bool(dimension.whole)}


def plain(value: Any) -> Any:
    """A value of a list in plain types, the same in every process."""
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))  # the order of a set changes between processes
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(value))  # so does the address of a function
