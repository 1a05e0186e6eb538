"""Targets: upper limits on the cost of a column."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.cell import Cell
from benchmarks.methods import AUTO, COMPILED, FLOOR, REFERENCE, REWEIGHT

TIME, MEMORY = "time", "memory"


@dataclass(frozen=True)
class Bar:
    """A target: an upper limit on a ratio.

    Args:
        column: the method that it applies to.
        most: the limit.
        what: time or memory.
        over: the method in the denominator of the ratio.
        below: whether the ratio must be strictly below the limit.
    """

    column: str
    most: float
    what: str = TIME
    over: str = REFERENCE
    below: bool = False

    def measured(self, cell: Cell) -> float | None:
        """The unrounded ratio of a row; None if it was not measured."""
        column = cell.get("columns", {}).get(self.column, {})
        ratio: float | None = column.get(f"{self.what}_over", {}).get(self.over)
        return ratio

    def is_met(self, ratio: float) -> bool:
        """Whether a ratio is within the limit."""
        return ratio < self.most if self.below else ratio <= self.most


# Two backward passes that store nothing in between: slower, with hardly more memory than plain training.
_REWEIGHT = (Bar(REWEIGHT, 1.45), Bar(REWEIGHT, 1.15, MEMORY))


def bars(time: float, memory: float | None = None) -> tuple[Bar, ...]:
    """Targets relative to plain training, for eager and compiled steps. On the CPU memory has no target."""
    if memory is None:
        return (Bar(AUTO, time), *_REWEIGHT)
    return (Bar(AUTO, time), Bar(COMPILED, time), Bar(AUTO, memory, MEMORY), *_REWEIGHT)


def floor_bars(time: float, memory: float | None = None) -> tuple[Bar, ...]:
    """Targets for small networks, where noise is a large share: the eager step relative to non-private plus noise.

    On CUDA, where memory has a target, the compiled step must be faster than eager plain training.
    """
    own: tuple[Bar, ...] = (Bar(AUTO, time, over=FLOOR),)
    if memory is not None:
        own += (Bar(COMPILED, 1.0, below=True), Bar(AUTO, memory, MEMORY))
    return own + _REWEIGHT
