"""Targets: upper limits on the cost of a column."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.cell import Cell
from benchmarks.methods import (
    AUTO,
    COMPILED,
    GRAPHED,
    INDUCTOR,
    OPACUS,
    PLAIN_AND_NOISE,
    PLAIN_COMPILED,
    REFERENCE,
    REWEIGHT,
)

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


_PEERS = tuple(Target(AUTO, 1.0, over=peer, below=True) for peer in OPACUS)
_FORMS = (COMPILED, INDUCTOR)  # of a compiled step; each is compared


def targets(time: float) -> tuple[Target, ...]:
    """Targets on a CPU, relative to plain training."""
    return (Target(AUTO, time), *_REWEIGHT)


def targets_over_noise(time: float) -> tuple[Target, ...]:
    """Targets on a CPU for small networks, where noise is a large share: relative to non-private plus noise."""
    return (Target(AUTO, time, over=PLAIN_AND_NOISE), *_REWEIGHT)


def targets_on_cuda(time: float, memory: float) -> tuple[Target, ...]:
    """The compiled step relative to plain `torch.compile` in time and to plain training in memory; the eager step
    relative to peers."""
    own = [(Target(form, time, over=PLAIN_COMPILED), Target(form, memory, MEMORY)) for form in _FORMS]
    return (*own[0], *own[1], *_PEERS)


def targets_of_small(graphed: float) -> tuple[Target, ...]:
    """On CUDA, for small networks: the compiled step must be faster than eager plain training."""
    own = [(Target(form, 1.0, below=True), Target(form, graphed, over=GRAPHED)) for form in _FORMS]
    return (*own[0], *own[1], *_PEERS)
