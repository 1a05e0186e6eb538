"""A table of what each accountant says about the same releases, with the one that counts marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from clipwise import accounting
from clipwise.cli.output import rounded_up
from clipwise.errors import UnsupportedEventError
from clipwise.ledger import multi_run
from clipwise.privacy import Entry

SecondOpinion = Annotated[
    bool,
    typer.Option("--second-opinion", help="Ask the library dp-accounting as well; it may take some seconds."),
]

# Beside PLD: name, heading, what its bound is good for, and why it has none where it has none.
OTHERS = (
    ("rdp", "RDP", "looser, shown while training", "no bound for this kind of step"),
    ("zcdp", "zCDP", "looser", "no bound: batches are sampled"),
    ("gdp", "GDP", "exact: nothing is sampled", "no bound: batches are sampled"),
)
SECOND = (
    "dp-accounting",
    "dp-accounting",
    "its own PLD: a second opinion",
    "no bound: batches of fixed size",
)


COUNTS = "the one that counts"


def table_of(
    history: Sequence[Entry],
    delta: float,
    second_opinion: bool = False,
    plan: Mapping[str, Any] | None = None,
) -> Table:
    """Every accountant's epsilon at `delta`. The central limit is shown for comparison, and named for what it is.

    Of several runs the Renyi filter counts, at the order that follows from the `plan` of the first.
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
    if "gdp" not in bounded:  # else the run is a Gaussian itself, and nothing is approximated
        approximate = accounting.central_limit_of(history).epsilon_if_it_were_true(delta)
        table.add_row("central limit", f"({approximate:.4g})", "no guarantee: may be too low")
    return table
