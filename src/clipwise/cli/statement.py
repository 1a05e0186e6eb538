"""`clipwise statement`: the privacy statement of the run in a ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from clipwise.cli.output import say
from clipwise.report.statement import of_ledger


def statement(
    ledger: Annotated[Path, typer.Argument(help="The ledger file of a run; it is only read.")],
    delta: Annotated[
        float | None, typer.Option(help="The delta to state; by default the one that the run was made for.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the statement for machines.")] = False,
) -> None:
    """The privacy statement of a run: what is promised, to whom, on what grounds, and what is not.

    For example:

        clipwise statement runs/demo/epsilon-3/ledger

    It tells the unit of privacy and who counts as a neighbour, how batches were drawn, how much noise was added
    to what, what all of it costs and leaves to an attacker, what is assumed, what is not covered, and the
    software. docs/guides/statement.md explains it line by line.
    """
    found = of_ledger(ledger, delta)
    say(json.dumps(found.to_dict(), indent=2, allow_nan=False) if as_json else str(found))
