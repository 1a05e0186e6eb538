"""The releases of a planned run or of ledgers, and a table of their cost by every accountant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from clipwise import accounting
from clipwise.cli.output import rounded_up, say
from clipwise.cli.run_options import RunOptions, naming_options, plan_of
from clipwise.errors import ConfigurationError, UnsupportedEventError
from clipwise.ledger import multi_run
from clipwise.privacy import Entry, Event
from clipwise.report.wording import NO_GUARANTEE
from clipwise.validation.arguments import number

# Accountants besides PLD: name, heading, remark on the bound, and the remark if there is no bound.
OTHERS = (
    ("rdp", "RDP", "looser, shown while training", "no bound for this kind of step"),
    ("zcdp", "zCDP", "looser", "no bound: batches are sampled"),
    ("gdp", "GDP", "exact: nothing is sampled", "no bound: batches are sampled"),
)
SECOND = ("dp-accounting", "dp-accounting", "PLD of that library: a second opinion", "no bound: fixed-size batches")


COUNTS = "report this one"

# A new key begins a new entry, so a run that was interrupted often has many entries of the same kind.
MOST_LINES = 12


@dataclass(frozen=True)
class Releases:
    """Releases of one or several runs, and a heading for them."""

    history: list[Entry]
    heading: str
    runs: tuple[multi_run.LedgerFile, ...] = ()

    @property
    def event(self) -> Event:
        """One of the events. All have the same adjacency and unit, or the accountants refuse them."""
        return self.history[0].event

    @property
    def is_seeded(self) -> bool:
        """Whether any run had a given seed, so that it claims no guarantee."""
        return multi_run.are_seeded(self.runs)

    @property
    def is_shared(self) -> bool:
        """Whether these are releases of several runs."""
        return multi_run.is_shared(self.history)

    @property
    def plan(self) -> Mapping[str, Any] | None:
        """The plan in the first ledger."""
        return self.runs[0].found.plan if self.runs else None

    @property
    def assumption(self) -> str:
        """The assumption of all figures other than the Renyi filter; "" for a single run."""
        return multi_run.assumption_of(self.history, "pld")

    def explain_runs(self) -> None:
        """Print which figure holds for which runs, if there are several."""
        if not self.is_shared:
            return
        order = multi_run.order_of(self.history, self.plan)
        named = ", with ledgers given in the order in which the runs began" if len(self.runs) > 1 else ""
        say(
            f"The Renyi filter (order {order:g}, from the first plan{named}) also holds for runs that were "
            f"configured after releases of others were seen. All other figures hold {self.assumption}."
        )

    def describe(self) -> None:
        """Print the contents of the ledgers, then the heading."""
        for run in self.runs:
            if len(self.runs) > 1:
                say(f"{run.path}: {run.found.position} releases of run {run.found.run}")
            _print_kinds(run.found.history)
            if run.found.torn:
                say(
                    "The last line of the ledger is incomplete, after a crash or damage. The most it can stand for is "
                    "counted."
                )
            elif not run.found.clean:
                say("The run is in progress or did not end cleanly. All that it may have released is counted.")
        if self.is_seeded:
            say(f"Guarantee: {NO_GUARANTEE}. All figures are those of the same runs with fresh keys.")
        say(self.heading)


def releases_of(ledgers: Sequence[Path] | None, options: RunOptions) -> Releases:
    """The releases in the ledgers, or of the planned run if there are none."""
    number("--delta", options.delta, above=0, below=1)
    if ledgers:
        if not options.is_empty:
            raise ConfigurationError("--ledger already describes the run: combine it only with --delta.")
        found = multi_run.read_files(ledgers)
        history = multi_run.joint_history(found)
        count = len({entry.run for entry in history})
        what = f"{count} runs together" if count > 1 else f"run {found[0].found.run}"
        return Releases(history, f"{sum(e.count for e in history)} releases of {what}", tuple(found))
    if options.noise_multiplier is None:
        raise ConfigurationError("Describe a run with --noise-multiplier and the other options, or give --ledger.")
    plan = plan_of(options)
    with naming_options():
        history = plan.history(options.noise_multiplier)
    return Releases(history, f"{plan}, noise multiplier {options.noise_multiplier:g}")


def _print_kinds(history: Sequence[Entry]) -> None:
    counts: Counter[Event] = Counter()
    for entry in history:
        counts[entry.event] += entry.count
    for e, count in list(counts.items())[:MOST_LINES]:
        say(
            f"{count} releases: {e.sampling} sampling at rate {e.sample_rate:.6g}, {e.adjacency} of one {e.unit}, "
            f"noise multiplier {e.noise_multiplier:g}"
        )
    if len(counts) > MOST_LINES:
        say(f"and {len(counts) - MOST_LINES} more kinds of release")


def table_of(
    history: Sequence[Entry], delta: float, second_opinion: bool = False, plan: Mapping[str, Any] | None = None
) -> Table:
    """A table of the epsilon of every accountant at `delta`, and of the central limit, which is no bound.

    For several runs the Renyi filter is the figure to report. Its order follows from the `plan` of the first.
    """
    table = Table("accountant", f"epsilon at delta {delta:g}", "")
    is_shared = multi_run.is_shared(history)
    if is_shared:
        spent = multi_run.epsilon_of(history, delta, multi_run.FILTER, plan)
        table.add_row("Renyi filter", rounded_up(spent), COUNTS, style="bold")
    table.add_row(
        "PLD",
        rounded_up(accounting.epsilon_of(history, delta)),
        "if all runs were fixed beforehand" if is_shared else COUNTS,
        style=None if is_shared else "bold",
    )
    bounded = set()
    for name, heading, good_for, why_not in (*OTHERS, *((SECOND,) if second_opinion else ())):
        try:
            table.add_row(heading, rounded_up(accounting.epsilon_of(history, delta, name)), good_for)
            bounded.add(name)
        except UnsupportedEventError:
            table.add_row(heading, "-", why_not)
        except ImportError:
            table.add_row(heading, "-", "needs the package dp-accounting")
    if "gdp" not in bounded:  # otherwise the run is one Gaussian mechanism, and nothing is approximated
        approximate = accounting.central_limit_of(history).epsilon_if_it_were_true(delta)
        table.add_row("central limit", f"({approximate:.4g})", "no guarantee: may be too low")
    return table
