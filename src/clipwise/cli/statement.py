"""`clipwise statement`: the privacy statement of a run, and its exports."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clipwise.cli.options import AsJson
from clipwise.cli.output import say, say_json
from clipwise.errors import ConfigurationError
from clipwise.report.model_card import model_card
from clipwise.report.nist import nist
from clipwise.report.record import RunRecord
from clipwise.report.registry import registry
from clipwise.report.run_statement import describe, run_statement
from clipwise.report.statement import of_ledger


def statement(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or its ledger file; they are only read.")],
    delta: Annotated[float | None, typer.Option(help="The delta to state; by default the delta of the run.")] = None,
    as_json: AsJson = False,
    as_registry: Annotated[
        bool, typer.Option("--registry", help="Print an entry for the OpenDP Deployments Registry, tier 3, as JSON.")
    ] = False,
    as_nist: Annotated[bool, typer.Option("--nist", help="Print a checklist after NIST SP 800-226.")] = False,
    as_card: Annotated[bool, typer.Option("--model-card", help="Print a model card for a model hub.")] = False,
) -> None:
    """The privacy statement of a run: the guarantee, its assumptions, and what it does not cover.

    For example:

        clipwise statement runs/mine

        clipwise statement runs/demo/epsilon-3/ledger

    For a folder, the statement covers the whole run: training, evaluation and released figures. For a ledger file, it
    states every detail of the releases in that ledger: sampling, noise, total cost, assumptions, exclusions and
    software versions. docs/guides/statement.md explains both line by line.
    """
    if sum((as_json, as_registry, as_nist, as_card)) > 1:
        raise ConfigurationError("Give only one of --json, --registry, --nist and --model-card.")
    if not run.is_dir() and not (as_registry or as_nist or as_card):
        found = of_ledger(run, delta)
        if as_json:
            say_json(found.to_dict())
        else:
            say(str(found))
        return
    record = RunRecord.read(run, delta)
    if as_json or as_registry:
        say_json(registry(record) if as_registry else run_statement(record))
    else:
        text = nist(record) if as_nist else model_card(record) if as_card else describe(record)
        say(text.rstrip("\n"))
