"""Shared by suites of rows: measure the missing rows, and write each to disk at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.cell import Cell
from benchmarks.methods import AUTO, REFERENCE, unavailable
from benchmarks.options import Options
from benchmarks.peers.measure import BASES, failures, measure_row
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
        missing = [row for row in rows if _missing(row, columns, device, results, retry=options.retry)]
        say(f"{len(missing)} rows to measure, {len(rows) - len(missing)} already measured")
        deadline = Deadline(options.budget_seconds)
        for number, row in enumerate(missing, 1):
            left = deadline.left()
            wanted = _missing(row, columns, device, results, retry=options.retry)
            before = results.cells.get(row.name, {})
            cell = _measure(_as_before(row, before), wanted, device, options, effort, left) if left > 0 else None
            if cell is None or (deadline.left() <= 0 and "failed" in cell):  # out of time: no result
                say(f"the time is up: {len(missing) - number + 1} rows are left for another run")
                break
            results.add(row.name, _merged(before, cell))
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


def _missing(row: Row, columns: list[str], device: torch.device, results: Results, *, retry: bool) -> list[str]:
    """The columns that a row does not have, and those that they are compared with; empty if it has all.

    With `retry`, a failed column that can run here does not count.
    """
    cell = results.cells.get(row.name)
    if cell is None or (retry and "failed" in cell):
        return columns
    if "failed" in cell:
        return []
    failed = failures(cell) if retry else {}
    lacks = {name for name in columns if name not in cell["columns"]}
    lacks |= {name for name in columns if name in failed and unavailable(name, device) is None}
    return [name for name in columns if name in lacks or name in (*BASES, AUTO)] if lacks else []


def _as_before(row: Row, cell: Cell) -> Row:
    """The row in the form in which its other columns were measured."""
    form = {name: cell[name] for name in ("optimizer", "channels_last") if name in cell}
    return replace(row, setting=replace(row.setting, **form)) if form else row


def _merged(before: Cell, cell: Cell) -> Cell:
    """A cell with the columns that were measured before. Those of which it has new figures are replaced."""
    if "columns" not in before:
        return cell
    if "failed" in cell:
        return before
    columns = before["columns"]
    new = {name: found for name, found in cell["columns"].items() if "failed" in columns.get(name, {"failed": ""})}
    for name in cell["columns"].keys() - new.keys():
        found = cell["columns"][name].get("time_over", {})
        new[name] = {**columns[name], "time_over": found | columns[name]["time_over"]}
    return {**cell, "columns": columns | new, "notes": sorted({*before.get("notes", []), *cell.get("notes", [])})}


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
