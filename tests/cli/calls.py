"""Helpers that call the command line and parse its output."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from clipwise import FileLedger
from clipwise.cli.app import app
from clipwise.privacy import Adjacency, Event, Sampling, Unit

EVENT = Event(Sampling.POISSON, Adjacency.ZERO_OUT, Unit.RECORD, 1.1, 0.01)
PLAN = ["--noise-multiplier", 1.1, "--sample-rate", 0.01, "--steps", 250]


def clipwise(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def figure(result: Any, row: str) -> float:
    """The number in the table row `row`."""
    assert result.exit_code == 0, result.output
    found = re.search(rf"{re.escape(row)}\W+([\d.e+-]+)", result.stdout)
    assert found, result.stdout
    return float(found.group(1))


def line(result: Any, words: str) -> str:
    """The line of the output that has these words."""
    (found,) = [text for text in result.stdout.splitlines() if words in text]
    return str(found)


def refused(result: Any, *words: str) -> None:
    """One clean line on stderr, exit code 2, no traceback."""
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert "Traceback" not in result.output and "\x1b" not in result.output
    for word in words:
        assert word in result.stderr, result.stderr


def write_ledger(path: Path, releases: int, close: bool = True, event: Event = EVENT, header: Any = None) -> Path:
    ledger = FileLedger(path, header=header)
    for _ in range(releases):
        ledger.charge(event)
    content = path.read_bytes()
    ledger.close()
    if not close:  # the state after a crash
        path.write_bytes(content)
    return path
