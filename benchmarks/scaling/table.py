"""Curves as Markdown: for each axis a table of time and one of memory, absolute and next to plain training."""

from __future__ import annotations

from benchmarks.cell import Cell
from benchmarks.methods import REFERENCE
from benchmarks.peers.table import COLUMNS
from benchmarks.records import Results
from benchmarks.scaling.axes import Axis, axes_for
from benchmarks.scaling.curves import QUANTITIES, Quantity, columns_of, growth, measured
from benchmarks.tables import Notes, conditions, grid

_LEAST_ROUNDS = 3


def markdown(results: Results) -> str:
    """The whole report: the environment, a section for each axis, notes."""
    notes = Notes()
    axes = axes_for(results.environment["device"], quick=results.environment["quick"])
    lines = ["# How the cost of a step grows", "", *conditions(results)]
    for axis in axes:
        lines += _section(axis, results, notes)
    return "\n".join([*lines, *notes.section()])


def _section(axis: Axis, results: Results, notes: Notes) -> list[str]:
    cells = measured(axis, results)
    lines = [f"## {axis.title}", ""]
    if not cells:
        return [*lines, "Not measured.", ""]
    if len(cells) < len(axis.rows):
        lines += [f"Shortened: {len(cells)} of {len(axis.rows)} points.", ""]
    for quantity in QUANTITIES:
        lines += _table(axis, quantity, cells, notes)
    return lines


def _table(axis: Axis, quantity: Quantity, cells: dict[int, Cell], notes: Notes) -> list[str]:
    columns = columns_of(cells)
    body = [[_mark(x, cell, notes), *(_entry(quantity, cell, c, notes) for c in columns)] for x, cell in cells.items()]
    exponents = [growth(cells, quantity, column) for column in columns]
    body.append(["exponent", *("" if k is None else f"{k:.2f}" for k in exponents)])
    text = (
        f"{quantity.name.capitalize()} of a step in {quantity.unit}, and how many times that of plain training it "
        "is; then the exponent of growth between the last two points:"
    )
    return [text, "", *grid([axis.name, *(COLUMNS[c] for c in columns)], body), ""]


def _mark(x: int, cell: Cell, notes: Notes) -> str:
    return " ".join([str(x), *(notes.mark(note) for note in cell.get("notes", []))])


def _entry(quantity: Quantity, cell: Cell, column: str, notes: Notes) -> str:
    figures = cell.get("columns", {}).get(column, {})
    reason = cell.get("failed") or figures.get("failed")
    if reason:
        return f"none {notes.mark(reason)}"
    value, ratio = quantity.value(cell, column), quantity.ratio(cell, column)
    if value is None:
        return ""
    few = f", {figures['rounds']} rounds" if figures["rounds"] < _LEAST_ROUNDS else ""
    if column == REFERENCE or ratio is None:
        return f"{value:.4g}{few}"
    return f"{value:.4g} ({ratio:.2f}x{few})"
