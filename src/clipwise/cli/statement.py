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
    delta: Annotated[float | None, typer.Option(help="The delta to state; by default the delta of the run.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the statement as JSON.")] = False,
) -> None:
    """The privacy statement of a run: the guarantee, its assumptions, and what it does not cover.

    For example:

        clipwise statement runs/demo/epsilon-3/ledger

    It states the unit of privacy and the adjacency, the sampling of batches, the noise, the total cost, the best
    that an attacker can do, the assumptions, the exclusions and the software versions. docs/guides/statement.md
    explains it line by line.
    """
    found = of_ledger(ledger, delta)
    say(json.dumps(found.to_dict(), indent=2, allow_nan=False) if as_json else str(found))
