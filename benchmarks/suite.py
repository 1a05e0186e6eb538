"""Shared by suites of rows: measure the missing rows, and write each to disk at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.cell import Cell
from benchmarks.methods import REFERENCE, unavailable
from benchmarks.options import Options
from benchmarks.peers.measure import failures, measure_row
from benchmarks.peers.rows import Row
from benchmarks.peers.table import COLUMNS
from benchmarks.records import Results
from benchmarks.timing import Effort
from clipwise.errors import ConfigurationError
from experiments.harness.environment import at_its_best, environment
from experiments.harness.limits import Deadline

_QUICK = Effort(3, enough_seconds=0.2)

Say = Callable[[str], None]
WriteTable = Callable[[Results, Path], str]


def measure_missing(
    rows: list[Row],
    columns: list[str],
    device: torch.device,
    options: Options,
    effort: Effort,
    write_table: WriteTable,
    say: Say,
) -> Results:
    """Measure the rows that the folder does not have, in order.

    Args:
        rows, columns: what to measure; `columns` includes plain training.
        device: the device.
        options: the options of the suite.
        effort: the effort for a row; the options may shorten it.
        write_table: writes the table; called after each row.
        say: prints a progress line.
    """
    with at_its_best(device):
        conditions = environment(device) | {"quick": options.quick, "suite": options.suite}
        results = Results.go_on(options.out, conditions)
        results.begin(options.command, options.seed)
        missing = [row for row in rows if not _has(row, columns, device, results, retry=options.retry)]
        say(f"{len(missing)} rows to measure, {len(rows) - len(missing)} already measured")
        deadline = Deadline(options.budget_seconds)
        for number, row in enumerate(missing, 1):
            left = deadline.left()
            cell = _measure(row, columns, device, options, effort, left) if left > 0 else None
            if cell is None or (deadline.left() <= 0 and "failed" in cell):  # out of time: no result
                say(f"the time is up: {len(missing) - number + 1} rows are left for another run")
                break
            results.add(row.name, cell)
            write_table(results, options.out)
            say(f"[{number}/{len(missing)}] {row.title}: {_in_short(cell)}")
    return results


def write_text(file: Path, text: str) -> str:
    """Write a file, and its folder if need be; returns the text."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return text


def chosen_columns(wanted: list[str], usual: set[str]) -> list[str]:
    """Plain training and the named columns, or the usual ones if none is named, in the order of tables."""
    for name in wanted:
        if name not in COLUMNS:
            choices = ", ".join(map(repr, COLUMNS))
            raise ConfigurationError(f"method={name!r} is no column: use one of {choices}.")
    chosen = {REFERENCE, *wanted} if wanted else usual
    return [name for name in COLUMNS if name in chosen]


def _has(row: Row, columns: list[str], device: torch.device, results: Results, *, retry: bool) -> bool:
    """Whether a row has all these columns. With `retry`, a failed column that can run here does not count."""
    cell = results.cells.get(row.name)
    if cell is None:
        return False
    if "failed" in cell:
        return not retry
    again = retry and any(unavailable(name, device) is None for name in failures(cell))
    return cell["columns"].keys() >= set(columns) and not again


def _measure(
    row: Row, columns: list[str], device: torch.device, options: Options, effort: Effort, seconds_left: float
) -> Cell:
    seconds = min(options.cell_seconds, seconds_left)
    effort = replace(effort, enough_seconds=min(effort.enough_seconds, seconds), cell_seconds=seconds)
    most = min(8 * len(columns) * options.cell_seconds, seconds_left)
    return measure_row(row, columns, device, options.seed, _QUICK if options.quick else effort, most)


def _in_short(cell: Cell) -> str:
    if "failed" in cell:
        return str(cell["failed"])
    plain = 1000 * cell["columns"][REFERENCE]["seconds"]
    ratios = [
        f"{COLUMNS[name]} {column['ratio']:.2f}"
        for name, column in cell["columns"].items()
        if name != REFERENCE and "failed" not in column
    ]
    return ", ".join([f"plain {plain:.4g} ms", *ratios])
