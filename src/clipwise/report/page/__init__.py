"""report.html: one self-contained page about a run, or a comparison of several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from clipwise.errors import ConfigurationError
from clipwise.report.page.comparison import comparison
from clipwise.report.page.report import report
from clipwise.report.record import LEDGER, RunRecord
from clipwise.report.run_statement import write_text

__all__ = ["write_comparison", "write_page"]

FILE = "report.html"


def write_page(run: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of a run and return its path.

    Args:
        run: the folder of the run, or its ledger file.
        out: the file; by default report.html in the folder, and for a ledger file the same name with .html.
    """
    record = RunRecord.read(run)
    return write_text(_place(record) if out is None else Path(out), report(record))


def write_comparison(runs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Path:
    """Write a page that compares runs, given as folders or ledger files, and return its path."""
    if len(runs) < 2:
        raise ConfigurationError("runs: give at least two runs to compare.")
    return write_text(Path(out), comparison([RunRecord.read(run) for run in runs]))


def _place(record: RunRecord) -> Path:
    if record.path.is_dir() or record.path.name == LEDGER:
        return record.folder / FILE
    return record.path.with_suffix(".html")
