"""The cost of a run after some of its steps, for plots and reports."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from clipwise.privacy import Entry

# With more kinds of steps than this, each point takes seconds: fewer points are chosen then.
MOST_KINDS, FEW_POINTS = 64, 6


def is_schedule(history: Sequence[Entry]) -> bool:
    """Whether a history has many kinds of steps."""
    return len({entry.event for entry in history}) > MOST_KINDS


def chosen_steps(history: Sequence[Entry], points: int) -> list[int]:
    """Step numbers from 1 to the last, denser at the start, where epsilon is most curved."""
    total, points = sum(entry.count for entry in history), FEW_POINTS if is_schedule(history) else points
    return sorted({1, *(max(1, round(total * (k / points) ** 2)) for k in range(1, points + 1))})


def first_steps(history: Sequence[Entry], steps: int) -> list[Entry]:
    """The first `steps` steps of a history."""
    before = [0, *accumulate(entry.count for entry in history)]
    return [
        Entry(entry.event, min(entry.count, steps - start), entry.run)
        for entry, start in zip(history, before, strict=False)
        if steps > start
    ]
