"""What a column may cost at most, and whether it does."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.cell import Cell
from benchmarks.methods import AUTO, COMPILED, FLOOR, REFERENCE, REWEIGHT

TIME, MEMORY = "time", "memory"


@dataclass(frozen=True)
class Bar:
    """A limit on a ratio.

    Args:
        column: the method that is held to it.
        most: the limit.
        what: of time or of memory.
        over: what the ratio is taken to.
        below: whether the ratio must be below the limit, and may not just reach it.
    """

    column: str
    most: float
    what: str = TIME
    over: str = REFERENCE
    below: bool = False

    def measured(self, cell: Cell) -> float | None:
        """The ratio of a row, unrounded; None where it was not measured."""
        column = cell.get("columns", {}).get(self.column, {})
        ratio: float | None = column.get(f"{self.what}_over", {}).get(self.over)
        return ratio

    def is_met(self, ratio: float) -> bool:
        """Whether a ratio keeps within the limit."""
        return ratio < self.most if self.below else ratio <= self.most


# Two backward passes that keep nothing in between: slower, and hardly more memory than plain training.
_REWEIGHT = (Bar(REWEIGHT, 1.45), Bar(REWEIGHT, 1.15, MEMORY))


def bars(time: float, memory: float | None = None) -> tuple[Bar, ...]:
    """Ratios to plain training, for ordinary and compiled steps; on the CPU memory has no limit."""
    if memory is None:
        return (Bar(AUTO, time), *_REWEIGHT)
    return (Bar(AUTO, time), Bar(COMPILED, time), Bar(AUTO, memory, MEMORY), *_REWEIGHT)


def floor_bars(time: float, memory: float | None = None) -> tuple[Bar, ...]:
    """For small networks, where noise is much of a step: the eager step is held to the floor.

    On CUDA, where memory has a limit, the compiled step must be faster than eager plain training.
    """
    own: tuple[Bar, ...] = (Bar(AUTO, time, over=FLOOR),)
    if memory is not None:
        own += (Bar(COMPILED, 1.0, below=True), Bar(AUTO, memory, MEMORY))
    return own + _REWEIGHT
