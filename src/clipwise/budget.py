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

    def recompute(self, history: list[Entry], event: Event, *, goes_on: bool) -> None:
        """After other releases than planned.

        Args:
            history: what was released.
            event: the kind of step to come.
            goes_on: whether the next release is counted with the last entry, not in one of its own. Only
                then does the rest of a shuffled epoch come at no further cost.
        """
        begun = history[-1].count if goes_on and history and history[-1].event == event else 0
        before = history[:-1] if begun else history
        if all(entry.event == event for entry in before) and (not before or event.period == 1):
            self.left = self._planned - begun - sum(entry.count for entry in before)
        else:
            most = self._planned + begun
            self.left = accounting.steps_within(before, event, self.epsilon, self.delta, most) - begun

    def is_exhausted(self, history: Callable[[], list[Entry]], event: Event) -> bool:
        """Whether no further step fits; looks again when the planned ones are used up."""
        if self.left <= 0:
            self.left = accounting.steps_within(history(), event, self.epsilon, self.delta, self._planned)
        return self.left <= 0
