"""A privacy budget, and which ledger histories are within it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from clipwise import accounting
from clipwise.errors import BudgetExhausted
from clipwise.ledger import multi_run
from clipwise.privacy import Entry, Event


class PrivacyBudget:
    """(epsilon, delta) for all releases of a ledger, of every run.

    A single run, with the preparation of its data, is accounted by PLD; several runs by the Renyi filter
    (multi_run.py).

    Args:
        epsilon: the budget.
        delta: its delta.
        steps: the number of steps of a single run that its noise was calibrated for.
    """

    def __init__(self, epsilon: float, delta: float, steps: int) -> None:
        self.epsilon, self.delta, self.planned = epsilon, delta, steps
        self._most: int | None = None  # the most participations of a unit in a single run

    def allows(self, history: Sequence[Entry], plan: Mapping[str, Any] | None) -> bool:
        """Whether this history is within the budget; `plan` is that of the ledger."""
        if multi_run.is_shared(history):
            plan = plan or multi_run.late_plan(self.epsilon, self.delta)
            spent = multi_run.epsilon_of(history, self.delta, multi_run.FILTER, plan, self.epsilon)
            return spent <= self.epsilon
        # The planned steps fit beside the preparation of the data: planned_run.py has verified it.
        preparation = [entry for entry in history if entry.event.purpose]
        steps = [entry for entry in history if not entry.event.purpose]
        if not steps:
            return accounting.epsilon_of(preparation, self.delta) <= self.epsilon
        event = steps[-1].event
        passes = sum(_passes(entry.count, entry.event) for entry in steps)
        return passes <= _passes(self.planned, event) or passes <= self._most_passes(event, preparation)

    def refuse(self, history: Sequence[Entry]) -> NoReturn:
        """Raise BudgetExhausted for a history with one release too many."""
        shared = " The budget is that of the whole ledger, which other runs have charged as well."
        raise BudgetExhausted(
            f"One more step would exceed epsilon={self.epsilon:g} at delta={self.delta:g} after "
            f"{sum(entry.count for entry in history) - 1} steps. Nothing was released for it."
            f"{shared if multi_run.is_shared(history) else ''}"
        )

    def _most_passes(self, event: Event, preparation: Sequence[Entry]) -> int:
        """The most participations of a unit. The noise is rounded up, so slightly more than planned may fit."""
        if self._most is None:
            steps = accounting.steps_within(preparation, event, self.epsilon, self.delta, 2 * self.planned)
            self._most = _passes(steps, event)
        return self._most


def _passes(steps: int, event: Event) -> int:
    return -(-steps // event.period)
