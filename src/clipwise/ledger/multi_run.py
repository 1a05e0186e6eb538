"""Several runs on the same data: their joint privacy cost, and the noise that a further run needs.

The releases of all runs compose. This is correct if the runs share records, and overcounts if they share none.

A run that is configured after releases of others were seen is adaptive: its noise, rate and length may depend on them.
PLD totals are proven if all runs were fixed before the first release. For adaptive runs a Renyi filter holds
(accounting/filter.py), at one order that does not depend on releases: the best order for the plan of the first run,
which that run writes into the ledger before its first release. If the first run had no plan, the first budget of a
later run sets the order, and nothing else of that run does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clipwise.accounting import calibrate
from clipwise.accounting.accountants import epsilon_of as epsilon_by
from clipwise.accounting.filter import best_order, epsilon_at, order_for_budget
from clipwise.errors import ConfigurationError, LedgerError, warn
from clipwise.ledger.ledger import JSON, Ledger, Snapshot, read
from clipwise.ledger.planned_run import PlannedRun
from clipwise.ledger.run_description import About
from clipwise.privacy import Entry, Event, rounded_up

FILTER = "renyi-filter"
IF_FIXED = "if all runs were fixed before the first release"
DEFAULT_DELTA, DEFAULT_EPOCHS = 1e-5, 10  # of a plan that names none
_USED_TWICE = (
    "the noise of both cancels in the difference of their releases, and both draw the same batches. No guarantee "
    "covers them together."
)


def is_shared(history: Sequence[Entry]) -> bool:
    """Whether a history has releases of more than one run."""
    return len({entry.run for entry in history}) > 1


def accountant_of(history: Sequence[Entry]) -> str:
    """The accountant that holds without further assumptions: PLD for a single run, else the filter."""
    return FILTER if is_shared(history) else "pld"


def assumption_of(history: Sequence[Entry], accountant: str) -> str:
    """The assumption of this accountant about the runs; "" if there is none."""
    return IF_FIXED if is_shared(history) and accountant != FILTER else ""


def order_of(history: Sequence[Entry], plan: Mapping[str, Any] | None) -> float:
    """The order of the filter, from the first event and `Ledger.plan`. Missing values are replaced by constants."""
    plan = plan or {}
    event = Event.from_dict(plan["event"]) if plan.get("event") else history[0].event
    delta, budget = plan.get("delta") or DEFAULT_DELTA, plan.get("budget")
    if budget is not None and plan.get("late"):
        return order_for_budget(budget, delta)
    steps = plan.get("planned") or round(DEFAULT_EPOCHS / event.sample_rate)
    return best_order(Entry(event, steps), delta, budget)


def late_plan(epsilon: float, delta: float) -> dict[str, Any]:
    """The plan of a ledger whose first run had none, from the budget of a later run."""
    return {"budget": epsilon, "delta": delta, "late": True}


def epsilon_of(
    history: Sequence[Entry],
    delta: float,
    accountant: str,
    plan: Mapping[str, Any] | None = None,
    budget: float | None = None,
) -> float:
    """Epsilon at `delta` of all releases, by an accountant or by the filter."""
    if accountant != FILTER:
        return epsilon_by(history, delta, accountant)
    return epsilon_at(order_of(history, plan), history, delta, budget=budget) if history else 0.0


@dataclass(frozen=True)
class Held:
    """The contents of a ledger when a run is configured.

    Args:
        history: all releases.
        about: the descriptions of their runs.
        plan: the plan of the ledger.
        continues: whether the new run must continue one of the runs in the ledger, from its checkpoint.
    """

    history: tuple[Entry, ...] = ()
    about: tuple[About, ...] = ()
    plan: Mapping[str, Any] | None = None
    continues: bool = False

    @property
    def planned(self) -> PlannedRun | None:
        """The run of the ledger, if it was planned before a preparation of its data."""
        return PlannedRun.of(self.plan)

    def require_planned(self, event: Event, steps: int | None, epsilon: float | None, delta: float) -> None:
        """Raise if the run was planned before its data were prepared, with other settings than these."""
        if self.planned is not None:
            self.planned.require(event, steps, epsilon, delta, self.history)

    def require_fitting(self, event: Event, epsilon: float | None, delta: float) -> None:
        """Raise if the releases of a new run cannot be composed with those in the ledger."""
        if self.continues or not self.history:
            return
        there = self.history[-1].event
        if (there.adjacency, there.unit) != (event.adjacency, event.unit):
            raise ConfigurationError(
                f"ledger holds releases under {there.adjacency} of one {there.unit}, and this run has "
                f"{event.adjacency} of one {event.unit}: no single guarantee covers both. Give this run its own "
                "ledger."
            )
        deltas = [about.delta for about in self.about if about.budget is not None and about.delta != delta]
        if epsilon is not None and deltas:
            raise ConfigurationError(
                f"delta={delta:g} is not the delta={deltas[0]!r} of another run in the ledger that has a budget. "
                "epsilon is the budget of the whole ledger: give the same delta, or give this run its own ledger."
            )

    def noise_for(self, event: Event, steps: int, epsilon: float, delta: float) -> float | None:
        """The noise multiplier with which `steps` events like `event` keep (epsilon, delta) for the whole ledger.

        None if the ledger does not affect it. A run that continues with the same plan keeps its noise.
        """
        if self.planned is not None:
            return self.planned.event.noise_multiplier
        if not self.history:
            return None
        if self.continues:
            found = self._noise_before(event, steps, epsilon, delta)
            if found is not None:
                return found
        plan = self.plan or late_plan(epsilon, delta)
        order = order_of(self.history, plan)
        z = calibrate.smallest_noise_after(self.history, event, steps, epsilon, delta, order)
        if z is None:
            spent = rounded_up(epsilon_of(self.history, delta, FILTER, plan))
            releases, runs = sum(e.count for e in self.history), len({e.run for e in self.history})
            raise ConfigurationError(
                f"epsilon={epsilon:g} at delta={delta:g} is used up: the ledger already holds {releases} releases of "
                f"{runs} run{'s' * (runs > 1)}, which cost epsilon {spent} ({FILTER}). epsilon is the budget of the "
                "whole ledger: give a larger one, or give this run its own ledger if it need not be counted together "
                "with the others."
            )
        return z

    def _noise_before(self, event: Event, steps: int, epsilon: float, delta: float) -> float | None:
        """The noise of the run in the ledger that has this plan."""
        for about in reversed(self.about):
            events = {
                replace(e.event, noise_multiplier=1.0)
                for e in self.history
                if e.run == about.run and not e.event.purpose
            }
            is_same = (about.budget, about.delta, about.planned) == (epsilon, delta, steps)
            if is_same and events == {replace(event, noise_multiplier=1.0)}:
                return about.noise_multiplier
        return None


def read_files(paths: Sequence[str | os.PathLike[str]]) -> list[Snapshot]:
    """Read ledger files. Raises if they cannot be counted together."""
    if not paths:
        raise ConfigurationError("Give at least one ledger file.")
    files = [read(path) for path in paths]
    for number, file in enumerate(files):
        for earlier in files[:number]:
            _require_another(earlier, file)
    if not any(file.history for file in files):
        names = " and ".join(str(file.path) for file in files)
        raise LedgerError(f"{names} holds no release yet: nothing was spent.")
    _require_one_guarantee(files)
    sizes = sorted({file.header["dataset_size"] for file in files if "dataset_size" in file.header}, key=str)
    if len(sizes) > 1:
        warn(
            f"the ledgers are of data sets of different sizes ({', '.join(map(str, sizes))} records). Only runs that "
            "share records need to be counted together; all of them are counted here."
        )
    return files


def joint_history(files: Sequence[Snapshot]) -> list[Entry]:
    """All releases of all runs, one ledger after the other.

    A run that was resumed from one checkpoint in two ledgers counts as two runs, so tags get the id of the ledger.
    """
    return [replace(entry, run=f"{file.run}/{entry.run}") for file in files for entry in file.history]


def require_unused(key: str, ledger: Ledger) -> None:
    """Raise if another run in this ledger used the noise key with this id."""
    if ledger.position and key in _keys(ledger.about):
        raise LedgerError(
            f"The ledger has releases of another run with the same noise key: {_USED_TWICE} Leave `seed` out, so "
            "that each run has its own key; or, for a test, give this run its own ledger."
        )


def _require_another(first: Snapshot, second: Snapshot) -> None:
    """Raise for two files of one run: its releases would count twice, and one of two copies is out of date."""
    if os.path.samefile(first.path, second.path):
        raise ConfigurationError(f"{second.path} is given twice: name each ledger once.")
    if first.run == second.run:
        raise LedgerError(
            f"{first.path} and {second.path} are copies of one ledger (run {first.run}): give only the one "
            "that the run has written to last."
        )
    if _keys(first.about) & _keys(second.about):
        raise LedgerError(
            f"{first.path} and {second.path} have releases with the same noise key: {_USED_TWICE} (If one of them "
            "continues the run of the other, it counts the releases of both: give only that one.)"
        )


def _keys(about: Iterable[Mapping[str, JSON]]) -> set[JSON]:
    return {key for each in about if isinstance(key := each.get("key"), str)}


def _require_one_guarantee(files: Sequence[Snapshot]) -> None:
    seen: dict[tuple[str, str], Path] = {}
    for file in files:
        for entry in file.history:
            seen.setdefault((str(entry.event.adjacency), str(entry.event.unit)), file.path)
    if len(seen) > 1:
        (one, first), (other, second) = list(seen.items())[:2]
        where = f"{first} and {second} have" if first != second else f"{first} has"
        raise LedgerError(
            f"{where} releases under different adjacencies or units ({one[0]} of one {one[1]}, {other[0]} of one "
            f"{other[1]}), so no single guarantee covers them: count each on its own."
        )
