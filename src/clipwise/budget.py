"""A privacy budget, counted in steps that still fit."""

from __future__ import annotations

from collections.abc import Callable

from clipwise import accounting
from clipwise.privacy import Entry, Event


class Budget:
    """How many more steps stay within (epsilon, delta)."""

    def __init__(self, epsilon: float, delta: float, steps: int) -> None:
        self.epsilon, self.delta, self._planned = epsilon, delta, steps
        self.left = steps  # the noise was calibrated for so many

    def recompute(self, history: list[Entry], event: Event) -> None:
        """After other releases than planned."""
        at_most = self._planned
        if all(entry.event == event for entry in history) and len(history) <= 1:
            self.left = self._planned - sum(entry.count for entry in history)
            if self.left > 0:
                return
        self.left = accounting.steps_within(history, event, self.epsilon, self.delta, at_most)

    def is_exhausted(self, history: Callable[[], list[Entry]], event: Event) -> bool:
        """Whether no further step fits; looks again when the planned ones are used up."""
        if self.left <= 0:
            self.left = accounting.steps_within(history(), event, self.epsilon, self.delta, self._planned)
        return self.left <= 0
