"""The cost of a run after some of its steps, for plots and reports."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from clipwise.privacy import Entry


def chosen_steps(total: int, points: int) -> list[int]:
    """Step numbers from 1 to the total, denser at the start, where epsilon is most curved."""
    return sorted({1, *(max(1, round(total * (k / points) ** 2)) for k in range(1, points + 1))})


def first_steps(history: Sequence[Entry], steps: int) -> list[Entry]:
    """The first `steps` steps of a history."""
    before = [0, *accumulate(entry.count for entry in history)]
    return [
        Entry(entry.event, min(entry.count, steps - start), entry.run)
        for entry, start in zip(history, before, strict=False)
        if steps > start
    ]
