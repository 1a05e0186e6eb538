"""The table as Markdown: ratios of time and memory to plain training, then the targets."""

from __future__ import annotations

from benchmarks.cell import Cell
from benchmarks.methods import (
    AUTO,
    COMPILED,
    GRAPHED,
    INDUCTOR,
    OPACUS,
    PLAIN_AND_NOISE,
    PLAIN_COMPILED,
    REFERENCE,
    REWEIGHT,
)
from benchmarks.peers.rows import Row, rows_for
from benchmarks.peers.targets import MEMORY, TIME, Target
from benchmarks.records import Results
from benchmarks.tables import Notes, conditions, grid

# Method names to column titles, in the order of the table.
COLUMNS = {
    REFERENCE: "plain",
    PLAIN_AND_NOISE: "plain + noise",
    AUTO: "clipwise",
    COMPILED: "clipwise compiled",
    INDUCTOR: "clipwise Inductor",
    GRAPHED: "plain graphed",
    PLAIN_COMPILED: "plain torch.compile",
    REWEIGHT: "clipwise reweight",
    **{name: name for name in OPACUS},
}
_LEAST_ROUNDS = 3


def markdown(results: Results) -> str:
    """The whole report: environment, times and memory, targets, notes."""
    notes = Notes()
    everything = rows_for(results.environment["device"], quick=results.environment["quick"])
    rows = [row for row in everything if row.name in results.cells]
    columns = {name for row in rows for name in results.cells[row.name].get("columns", {})}
    names = [name for name in COLUMNS if name in columns | {REFERENCE}]
    lines = ["# Private steps next to plain ones", "", *conditions(results)]
    if len(rows) < len(everything):
        lines += [f"Shortened: {len(rows)} of {len(everything)} rows.", ""]
    lines += _costs(rows, names, results, notes) + _bars(rows, results)
    return "\n".join([*lines, *notes.section()])


def _costs(rows: list[Row], names: list[str], results: Results, notes: Notes) -> list[str]:
    header = ["", *(_heading(name) for name in names)]
    over = COMPILED in names and GRAPHED in names
    header += ["compiled over graphed"] if over else []
    body = []
    for row in rows:
        cell = results.cells[row.name]
        entries = [_entry(name, cell, notes) for name in names]
        entries += [_over_graphed(cell)] if over else []
        body.append([_title(row, cell, notes), *entries])
    text = "Plain training in milliseconds and MiB; then how many times its time / its memory a step takes:"
    return [text, "", *grid(header, body), ""]


def _heading(name: str) -> str:
    return f"{COLUMNS[name]}, ms / MiB" if name == REFERENCE else COLUMNS[name]


def _title(row: Row, cell: Cell, notes: Notes) -> str:
    marks = [notes.mark(note) for note in cell.get("notes", [])]
    return " ".join([row.title, *marks])


def _entry(name: str, cell: Cell, notes: Notes) -> str:
    column = cell.get("columns", {}).get(name, {})
    reason = cell.get("failed") or column.get("failed")
    if reason:
        return f"none {notes.mark(reason)}"
    if not column:
        return ""
    short = f" ({column['rounds']} rounds)" if column["rounds"] < _LEAST_ROUNDS else ""
    if name == REFERENCE:
        peak = column["peak_bytes"]
        memory = "" if peak is None else f" / {peak / 2**20:.0f}"
        return f"{1000 * column['seconds']:.4g}{memory}{short}"
    memory_over = column.get(f"{MEMORY}_over", {}).get(REFERENCE)
    return f"{column['ratio']:.2f}" + ("" if memory_over is None else f" / {memory_over:.2f}") + short


def _over_graphed(cell: Cell) -> str:
    ratio = cell.get("columns", {}).get(COMPILED, {}).get(f"{TIME}_over", {}).get(GRAPHED)
    return "" if ratio is None else f"{ratio:.2f}"


def _bars(rows: list[Row], results: Results) -> list[str]:
    """Each target with the measured ratio. It has three digits, because two could hide a miss."""
    labels = list(dict.fromkeys(_label(target) for row in rows for target in row.targets))
    body = []
    for row in rows:
        verdicts = {_label(target): _verdict(target, results.cells[row.name]) for target in row.targets}
        body.append([row.title, *(verdicts.get(label, "") for label in labels)])
    return ["The targets:", "", *grid(["", *labels], body), ""]


def _label(target: Target) -> str:
    over = "" if target.over == REFERENCE else f" over {COLUMNS[target.over]}"
    return f"{COLUMNS[target.column]}, {target.what}{over}"


def _verdict(target: Target, cell: Cell) -> str:
    limit = f"{'<' if target.below else '<='} {target.most:.2f}"
    ratio = target.measured(cell)
    if ratio is None:
        return f"{limit}: not measured"
    return f"{limit}: {'met' if target.is_met(ratio) else '**not met**'} ({ratio:.3f})"
