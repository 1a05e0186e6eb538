"""Encoding of table columns as bounded numbers, by fixed constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Number:
    """A quantity: [low, high] becomes [-1, 1]; values outside are clamped.

    Attributes:
        low, high: public constants, not computed from the records.
        logarithmic: on the scale sign(x) log(1 + |x| / unit), for amounts of money and other long tails.
        unit: of that scale.
    """

    low: float
    high: float
    logarithmic: bool = False
    unit: float = 1.0

    # A number that fills its range evenly has a mean square of 1/3; real ones crowd in the middle.
    typical_square = 0.25

    def names(self, column: str) -> list[str]:
        """Of the features that the column becomes."""
        return [column]

    def encoded(self, values: NDArray[Any]) -> Array:
        """(N,) to (N, 1)."""
        scaled, low, high = (self._scaled(v) for v in (values.astype(np.float64), self.low, self.high))
        unit_N = (np.clip(scaled, low, high) - low) / (high - low)
        encoded: Array = np.nan_to_num(2 * unit_N - 1)[:, None].astype(np.float32)
        return encoded

    def _scaled(self, values: Any) -> Any:
        return np.sign(values) * np.log1p(np.abs(values) / self.unit) if self.logarithmic else values


@dataclass(frozen=True)
class Levels:
    """One-hot encoding of a categorical column.

    A value that is not in the public list gives 0 everywhere: an error would reveal something about the record.
    """

    levels: tuple[str, ...]

    typical_square = 1.0

    def names(self, column: str) -> list[str]:
        """Of the features that the column becomes."""
        return [f"{column}={level}" for level in self.levels]

    def encoded(self, values: NDArray[Any]) -> Array:
        """(N,) to (N, levels)."""
        text = np.array([f"{v:g}" for v in values]) if values.dtype.kind == "f" else values
        encoded: Array = (text[:, None] == np.array(self.levels)[None]).astype(np.float32)
        return encoded


@dataclass(frozen=True)
class Flag:
    """Yes (1) or no (0), as it is; anything else counts as 0."""

    typical_square = 0.25

    def names(self, column: str) -> list[str]:
        """Of the features that the column becomes."""
        return [column]

    def encoded(self, values: NDArray[Any]) -> Array:
        """(N,) to (N, 1)."""
        encoded: Array = (values == 1)[:, None].astype(np.float32)
        return encoded


Column = Number | Levels | Flag
