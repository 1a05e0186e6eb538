"""`clipwise report`: one page about a run, or a comparison of several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clipwise.cli.output import say
from clipwise.errors import ConfigurationError
from clipwise.report.page import write_comparison, write_page

COMPARISON = Path("comparison.html")


def report(
    runs: Annotated[list[Path], typer.Argument(help="The folder of a run, or its ledger file; several to compare.")],
    out: Annotated[
        Path | None,
        typer.Option(help="The file to write; by default report.html in the run's folder, or comparison.html here."),
    ] = None,
) -> None:
    """One page about a run: the guarantee, how much an attacker learns, results, what is not protected.

    For example:

        clipwise report runs/mine

        clipwise report runs/epsilon-1 runs/epsilon-3 --out compare.html

    The page is one HTML file without scripts and network requests, for a screen, a phone or print.
    docs/guides/report.md explains every part of it.
    """
    if out is not None and out.is_dir():
        raise ConfigurationError(f"--out {out} is a folder: name a file.")
    if out is not None and not out.parent.is_dir():
        raise ConfigurationError(f"--out {out} cannot be written: there is no folder {out.parent}. Create it first.")
    if len({run.resolve() for run in runs}) < len(runs):
        raise ConfigurationError("A run is given twice: name each run once.")
    file = write_page(runs[0], out) if len(runs) == 1 else write_comparison(runs, COMPARISON if out is None else out)
    say(f"Report written to {file}")
