"""One plot for each axis: time and memory side by side, absolute above and next to plain training below."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cell import Cell
from benchmarks.methods import REFERENCE
from benchmarks.peers.table import COLUMNS
from benchmarks.records import Results
from benchmarks.scaling.axes import Axis, axes_for
from benchmarks.scaling.curves import QUANTITIES, columns_of, measured
from experiments.harness.drawing import drawing

Read = Callable[[Cell, str], float | None]


def plot_all(results: Results, folder: Path) -> list[Path]:
    """Write a picture for each axis that has results; returns the files."""
    files = []
    for axis in axes_for(results.environment["device"], quick=results.environment["quick"]):
        cells = measured(axis, results)
        if cells:
            file = folder / f"{axis.name}.svg"
            _plot(axis, cells, file)
            files.append(file)
    return files


def _plot(axis: Axis, cells: dict[int, Cell], file: Path) -> None:
    with drawing(file, width=8.4, height=6.0) as canvas:
        panels = canvas.subplots(2, len(QUANTITIES), sharex=True)
        for place, quantity in enumerate(QUANTITIES):
            above, below = panels[0][place], panels[1][place]
            columns = columns_of(cells)
            _curves(above, cells, columns, quantity.value)
            above.set_ylabel(f"{quantity.name}, {quantity.unit}")
            _set_log(above)
            _curves(below, cells, columns, quantity.ratio)
            below.set_ylabel(f"{quantity.name}, times plain")
            below.set_xlabel(axis.name)
            below.set_xscale("log", base=2)
            below.set_xticks(list(cells), list(cells))
        lines, texts = panels[0][0].get_legend_handles_labels()
        canvas.legend(lines, texts, loc="outside lower center", ncols=len(texts))
        canvas.suptitle(axis.title)


def _curves(panel: Any, cells: dict[int, Cell], columns: list[str], read: Read) -> None:
    """One curve per column, in the colour of the column, without the points that were not measured."""
    for column in columns:
        heights = [read(cell, column) for cell in cells.values()]
        known = [math.nan if height is None else height for height in heights]
        style = {"linestyle": "--", "color": "grey"} if column == REFERENCE else {}
        panel.plot(list(cells), known, marker="o", markersize=3, label=COLUMNS[column], **style)


def _set_log(panel: Any) -> None:
    """A logarithmic scale, where there is a value to draw."""
    values = [y for line in panel.get_lines() for y in line.get_ydata()]
    if not all(map(math.isnan, values)):
        panel.set_yscale("log")
