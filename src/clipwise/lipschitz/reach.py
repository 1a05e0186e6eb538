"""How large a value of the network can be for one example."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Reach:
    """What no example passes, at one place of the network.

    Args:
        shape: of one example's value, without the batch.
        norm: L2, of the whole value.
        row: L2, along the last dimension, at any position.
        entry: any single number.
    """

    shape: tuple[int, ...]
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
