"""What a command is asked about: a run that is planned, or runs that are in ledgers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from clipwise.cli.naming import naming_options
from clipwise.cli.output import say
from clipwise.cli.plan import Asked, plan_of
from clipwise.errors import ConfigurationError
from clipwise.ledger import combined_runs as runs
from clipwise.ledger import multi_run
from clipwise.ledger.ledger import Snapshot
from clipwise.privacy import Entry, Event
from clipwise.report.wording import NO_GUARANTEE
from clipwise.validation.arguments import number

Ledgers = Annotated[
    list[Path] | None,
    typer.Option(
        "--ledger",
        help="In place of a plan: count what is in this ledger file. Given several times, the runs add up.",
    ),
]

# A change of key begins a new entry: a run that was broken off often has many of the same kind.
MOST_LINES = 12


@dataclass(frozen=True)
class Subject:
    """Releases, and what to call them."""

    history: list[Entry]
    heading: str
    runs: tuple[runs.Run, ...] = ()

    @property
    def event(self) -> Event:
        """One of the events: all have the same adjacency and unit, or no accountant takes them."""
        return self.history[0].event

    @property
    def is_seeded(self) -> bool:
        """Whether any of the runs had a given seed, so that no guarantee is claimed."""
        return runs.are_seeded(self.runs)

    @property
    def is_shared(self) -> bool:
        """Whether these are the releases of several runs."""
        return multi_run.is_shared(self.history)

    @property
    def plan(self) -> Mapping[str, Any] | None:
        """That of the ledger that was named first."""
        return self.runs[0].found.plan if self.runs else None

    @property
    def assumption(self) -> str:
        """What figures other than that of the Renyi filter rest on; "" for a single run."""
        return multi_run.assumption_of(self.history, "pld")

    def explain_runs(self) -> None:
        """Print which figure holds for which runs, if there are several."""
        if not self.is_shared:
            return
        order = multi_run.order_of(self.history, self.plan)
        named = ", with ledgers named in the order in which they were begun" if len(self.runs) > 1 else ""
        say(
            f"The Renyi filter (order {order:g}, from the first plan{named}) holds also for runs that were "
            f"configured after releases of others were seen. All other figures hold {self.assumption}."
        )

    def describe(self) -> None:
        """Print what there is in ledgers, and then the heading."""
        for run in self.runs:
            if len(self.runs) > 1:
                say(f"{run.path}: {run.found.position} releases of run {run.found.run}")
            _print_kinds(run.found.history)
            _explain_end(run.found)
        if self.is_seeded:
            say(
                f"Guarantee: {NO_GUARANTEE}. All figures are those that the same runs would have with fresh keys."
            )
        say(self.heading)


def subject_of(
    ledgers: Sequence[Path] | None, noise_multiplier: float | None, asked: Asked, delta: float
) -> Subject:
    """The one of the two that was given."""
    number("--delta", delta, above=0, below=1)
    if ledgers:
        if noise_multiplier is not None or not asked.says_nothing:
            raise ConfigurationError("--ledger knows the run: give it alone, or together with --delta.")
        found = runs.read(ledgers)
        history = runs.history(found)
        count = len({entry.run for entry in history})
        what = f"{count} runs together" if count > 1 else f"run {found[0].found.run}"
        return Subject(history, f"{sum(e.count for e in history)} releases of {what}", tuple(found))
    if noise_multiplier is None:
        raise ConfigurationError("Give --noise-multiplier and the run, or --ledger and a file.")
    plan = plan_of(asked, delta)
    with naming_options():
        history = plan.history(noise_multiplier)
    return Subject(history, f"{plan}, noise multiplier {noise_multiplier:g}")


def _print_kinds(history: Sequence[Entry]) -> None:
    counts: dict[Event, int] = {}
    for entry in history:
        counts[entry.event] = counts.get(entry.event, 0) + entry.count
    for e, count in list(counts.items())[:MOST_LINES]:
        say(
            f"{count} releases: {e.sampling} sampling at rate {e.sample_rate:.6g}, {e.adjacency} of one {e.unit}, "
            f"noise multiplier {e.noise_multiplier:g}"
        )
    if len(counts) > MOST_LINES:
        say(f"and {len(counts) - MOST_LINES} more kinds of release")


def _explain_end(found: Snapshot) -> None:
    if found.torn:
        say(
            "The last line of the ledger is torn, by a crash or by damage. The most it can stand for is counted."
        )
    elif not found.clean:
        say("The run is still going on, or did not end cleanly. All that it may have released is counted.")
