"""Targets: upper limits on the cost of a column."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.cell import Cell
from benchmarks.methods import AUTO, COMPILED, PLAIN_AND_NOISE, REFERENCE, REWEIGHT

TIME, MEMORY = "time", "memory"


@dataclass(frozen=True)
class Target:
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
_REWEIGHT = (Target(REWEIGHT, 1.45), Target(REWEIGHT, 1.15, MEMORY))


def targets(time: float, memory: float | None = None) -> tuple[Target, ...]:
    """Targets relative to plain training, for eager and compiled steps. On the CPU memory has no target."""
    if memory is None:
        return (Target(AUTO, time), *_REWEIGHT)
    return (Target(AUTO, time), Target(COMPILED, time), Target(AUTO, memory, MEMORY), *_REWEIGHT)


def targets_over_noise(time: float, memory: float | None = None) -> tuple[Target, ...]:
    """Targets for small networks, where noise is a large share: the eager step relative to non-private plus noise.

    On CUDA, where memory has a target, the compiled step must be faster than eager plain training.
    """
    own: tuple[Target, ...] = (Target(AUTO, time, over=PLAIN_AND_NOISE),)
    if memory is not None:
        own += (Target(COMPILED, 1.0, below=True), Target(AUTO, memory, MEMORY))
    return own + _REWEIGHT
