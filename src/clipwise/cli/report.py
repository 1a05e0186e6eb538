"""`clipwise report`: one page about a run, or a comparison of several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clipwise.cli.output import say
from clipwise.errors import ConfigurationError
from clipwise.ledger.durable_files import require_writable
from clipwise.report.page import write_comparison, write_page


def report(
    runs: Annotated[list[Path], typer.Argument(help="The folder of a run, or its ledger file; several to compare.")],
    out: Annotated[
        Path | None, typer.Option(help="The file; by default report.html in the run's folder, or comparison.html here.")
    ] = None,
) -> None:
    """One page about a run: the guarantee, how much an attacker learns, results, what is not protected.

    For example:

        clipwise report runs/mine

        clipwise report runs/epsilon-1 runs/epsilon-3 --out compare.html

    The page is one HTML file without scripts and network requests, for a screen, a phone or print.
    docs/guides/report.md explains every part of it.
    """
    if out is not None:
        require_writable("--out", out)
    if len({run.resolve() for run in runs}) < len(runs):
        raise ConfigurationError("A run is given twice: name each run once.")
    file = write_page(runs[0], out) if len(runs) == 1 else write_comparison(runs, out or Path("comparison.html"))
    say(f"Report written to {file}")
