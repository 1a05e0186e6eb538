"""Pictures of the results, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.harness.drawing import can_draw, drawing
from experiments.harness.results import measured
from experiments.harness.store import Store
from experiments.normalization.records import Results, results, tables_of
from experiments.normalization.speed import curves
from experiments.normalization.tables import FIGURE_1, Table

Line = tuple[str, list[float], list[float], Any]  # label, x, y, errors


def plot_all(store: Store, is_quick: bool, folder: Path) -> list[Path]:
    """Figure 1, and accuracy by epsilon; nothing without matplotlib."""
    if not can_draw():
        return []
    written = []
    for table in tables_of(is_quick):
        found = results(table, store)
        for family in table.families:
            lines = list(_by_epoch(table, store, family) if table.over == "noise" else _lines(table, found, family))
            if lines:
                file = folder / f"table-{table.name}-{_plain(family)}.svg"
                _picture(table, family, lines, file)
                written.append(file)
    return written


def _picture(table: Table, family: str, lines: list[Line], file: Path) -> None:
    with drawing(file, width=6, height=4) as canvas:
        axes = canvas.add_subplot()
        for label, xs, ys, errors in lines:
            axes.errorbar(xs, ys, yerr=errors, marker=".", label=label, capsize=2)
        axes.set_xlabel("epoch" if table.over == "noise" else "epsilon")
        axes.set_ylabel("validation accuracy, %" if table.over == "noise" else "test accuracy, %")
        if table.over == "epsilon":
            axes.set_xscale("log")
        axes.set_title(f"{family}, table {table.name}")
        axes.legend()


def _by_epoch(table: Table, store: Store, family: str) -> Iterator[Line]:
    """A line for each noise, over epochs, at the middle one of the rates."""
    if table.name in FIGURE_1:
        for value, accuracies in curves(table, store, family, len(table.trials) // 2).items():
            xs = [float(epoch) for epoch in range(1, len(accuracies) + 1)]
            yield f"noise {value:g}", xs, [100 * y for y in accuracies], None


def _lines(table: Table, found: Results, family: str) -> Iterator[Line]:
    """A line for each method, over epsilon."""
    for method in table.methods:
        known = {value: measured(found.get((family, method, value), [])) for value in table.values}
        there = {value: m for value, m in known.items() if m is not None}
        if there:
            errors = [m.error or 0.0 for m in there.values()]
            yield method, list(there), [m.mean for m in there.values()], errors


def _plain(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name).lower()
