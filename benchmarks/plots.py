"""One plot for each figure of the paper."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.grid import Figure, figures
from benchmarks.methods import all_methods
from benchmarks.records import Results
from benchmarks.tables import cell_of, label, shown
from benchmarks.workload import Setting
from experiments.harness.drawing import drawing


def plot_all(results: Results, folder: Path) -> list[Path]:
    """Write a picture for each figure that has results; returns the files."""
    files = []
    for figure in figures():
        settings, methods = shown(figure, results)
        if settings:
            file = folder / f"figure-{figure.name}.svg"
            _plot(figure, settings, methods, results, file)
            files.append(file)
    return files


def _plot(figure: Figure, settings: list[Setting], methods: list[str], results: Results, file: Path) -> None:
    panels = list(dict.fromkeys(getattr(s, figure.panel) for s in settings))
    with drawing(file, width=2 + 3.6 * len(panels), height=4.2) as canvas:
        for place, panel in enumerate(panels, 1):
            axes = canvas.add_subplot(1, len(panels), place)
            inside = [s for s in settings if getattr(s, figure.panel) == panel]
            _panel(axes, figure, inside, methods, results)
            axes.set_title(str(panel))
        lines, texts = canvas.axes[0].get_legend_handles_labels()
        canvas.legend(lines, texts, loc="outside right upper")
        canvas.suptitle(textwrap.fill(figure.title, 36 * len(panels) + 12))


def _panel(axes: Any, figure: Figure, settings: list[Setting], methods: list[str], results: Results) -> None:
    """Milliseconds per example, on a logarithmic scale, so that batch sizes compare as in the paper."""
    width = 0.8 / len(methods)
    measured = False
    for number, method in enumerate(methods):
        heights = [_height(figure, s, method, results) for s in settings]
        measured |= not all(map(math.isnan, heights))
        if figure.bars:
            places = [x + (number - (len(methods) - 1) / 2) * width for x in range(len(settings))]
            axes.bar(places, heights, width, label=label(method))
        else:
            axes.plot([getattr(s, figure.x) for s in settings], heights, marker="o", label=label(method))
    ticks = [getattr(s, figure.x) for s in settings]
    if figure.bars:
        axes.set_xticks(range(len(settings)), ticks, rotation=20)
    else:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, ticks)
    axes.set_xlabel(figure.x.replace("_", " "))
    if measured and not figure.largest_batch:  # a logarithmic scale needs at least one value
        axes.set_yscale("log")
    axes.set_ylabel("largest batch" if figure.largest_batch else "milliseconds an example")


def _height(figure: Figure, setting: Setting, method: str, results: Results) -> float:
    """The plotted value of a cell; nothing is drawn for a method that failed.

    The speed of the machine varies between cells. So a time is the cell's ratio to non-private training, times the
    median of all non-private times of the setting.
    """
    cell = cell_of(figure, setting, method, results)
    if cell is None or "failed" in cell:
        return math.nan
    if figure.largest_batch:
        return float(cell["largest_batch"])
    cells = (cell_of(figure, setting, m, results) for m in all_methods())
    reference = median(c["reference_seconds"] for c in cells if c and "failed" not in c)
    return float(1000 * cell["ratio"] * reference / setting.batch)
