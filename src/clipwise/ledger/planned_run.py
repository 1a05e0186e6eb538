"""Runs that prepare their data: noised counts and training steps that were all fixed before the first release.

From the noised counts the encoding of the data is made. PLD holds for a composition whose noise multipliers, rates and
number of steps do not depend on released values; what the steps compute may depend on them. So the run is planned in
the ledger before the first release, the preparation is charged under its tag, and `make_private` takes over the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from clipwise.accounting.accountants import epsilon_of
from clipwise.errors import ConfigurationError
from clipwise.ledger.file_format import new_tag
from clipwise.ledger.run_description import About, versions
from clipwise.privacy import Entry, Event

if TYPE_CHECKING:
    from clipwise.ledger.ledger import Ledger

# The noise of a step may differ from its plan by rounding only.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class PlannedRun:
    """What was fixed before the first release of a run: `steps` events like `event`, within (epsilon, delta)."""

    run: str
    event: Event
    steps: int
    epsilon: float
    delta: float

    @classmethod
    def of(cls, plan: Mapping[str, Any] | None) -> PlannedRun | None:
        """From the plan of a ledger; None if it names no run."""
        if plan is None or plan.get("run") is None:
            return None
        return cls(plan["run"], Event.from_dict(plan["event"]), plan["planned"], plan["budget"], plan["delta"])

    def require(
        self, event: Event, steps: int | None, epsilon: float | None, delta: float, history: Sequence[Entry]
    ) -> None:
        """Raise for other settings than the planned ones, and if the preparation leaves too little of the budget."""
        z, planned = event.noise_multiplier, self.event.noise_multiplier
        same = replace(event, noise_multiplier=planned) == self.event and abs(z - planned) <= _ROUNDING * planned
        if not (same and (steps, epsilon, delta) == (self.steps, self.epsilon, self.delta)):
            raise ConfigurationError(
                "The ledger holds a run whose privacy settings were fixed before its data were prepared, and this run "
                "has others: give the same epsilon, delta, batch size and number of steps, or a new ledger."
            )
        whole = [entry for entry in history if entry.event.purpose]
        if epsilon_of([*whole, Entry(self.event, self.steps)], delta) > self.epsilon:
            raise ConfigurationError(
                f"The preparation in the ledger was released more often than planned, so the planned steps exceed "
                f"epsilon={self.epsilon:g} at delta={delta:g}: begin a new run with a new ledger."
            )


def plan_run(
    ledger: Ledger, event: Event, steps: int, epsilon: float, delta: float, *, seeded: bool = False, key: str = ""
) -> str:
    """Plan the run of an empty ledger, and return the tag under which its preparation is charged.

    Args:
        ledger: a ledger without releases.
        event: of the steps, with their noise multiplier.
        steps: their number.
        epsilon: the budget of the preparation and the steps together.
        delta: its delta.
        seeded: whether the preparation uses a seed given by the user.
        key: the public id of the noise key of the preparation.
    """
    if ledger.position:
        raise ConfigurationError("A run is planned before its first release: give a new ledger.")
    about = About(
        noise="standard",
        delta=delta,
        budget=epsilon,
        run=(tag := new_tag()),
        planned=steps,
        noise_multiplier=event.noise_multiplier,
        event=event.to_dict(),
        seeded=seeded,
        key=key or None,
        versions=versions(),
    )
    ledger.describe(about.to_dict())
    return tag


def awaiting_training(ledger: Ledger) -> PlannedRun | None:
    """The run that was planned in this ledger, if it has released nothing but the preparation of its data."""
    is_begun = any(not entry.event.purpose for entry in ledger.history())
    return None if is_begun else PlannedRun.of(ledger.plan)
