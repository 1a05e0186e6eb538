"""The Pareto front: the runs that no other run beats in both accuracy and epsilon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Point:
    """One finished run of a search."""

    number: int
    accuracy: float
    epsilon: float
    settings: dict[str, Any]


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other point beats, sorted by epsilon; the first of equal ones."""
    found: list[Point] = []
    for p in sorted(points, key=lambda p: (p.epsilon, -p.accuracy, p.number)):
        if not found or p.accuracy > found[-1].accuracy:
            found.append(p)
    return found
