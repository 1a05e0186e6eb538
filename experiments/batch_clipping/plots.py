"""Pictures of the results, where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.batch_clipping import tuned
from experiments.batch_clipping.conclusions import finals
from experiments.batch_clipping.figures import FIGURES, Figure
from experiments.batch_clipping.rows import Rows, rows_of
from experiments.harness import report
from experiments.harness.drawing import can_draw, drawing
from experiments.harness.store import Store


def plot_all(store: Store, quick: bool, folder: Path) -> list[Path]:
    """A plot for each figure with curves, one of layer norms, one of the table at equal epsilon."""
    if not can_draw():
        return []
    shown = rows_of(store.cells.values(), quick)
    files = []
    for figure in FIGURES:
        rows = [row.label for row in figure.rows if _curve(shown, figure, row.label)]
        if rows:
            files.append(_curves(figure, rows, shown, folder / f"figure-{figure.name}.svg"))
    norms = [cell for cells in shown.values() for cell in cells if "norms_by_epoch" in cell]
    if norms:
        files.append(_norms(norms[0]["norms_by_epoch"], folder / "layer-norms.svg"))
    if any(name == tuned.NAME for name, _, _ in shown):
        files.append(_equal(shown, folder / f"{tuned.NAME}.svg"))
    return files


def _curves(figure: Figure, rows: list[str], shown: Rows, file: Path) -> Path:
    """Accuracy on the public tenth after each epoch, for the first seed."""
    with drawing(file, width=8, height=4) as canvas:
        axes = canvas.add_subplot()
        for row in rows:
            curve = _curve(shown, figure, row)
            axes.plot(range(1, len(curve) + 1), [100 * a for a in curve], marker="." * (len(curve) < 2), label=row)
        axes.set_xlabel("epoch")
        axes.set_ylabel("accuracy on the public tenth, %")
        axes.set_title(figure.title, fontsize=8)
        canvas.legend(loc="outside right upper")
    return file


def _norms(norms: list[dict[str, float]], file: Path) -> Path:
    """The norm of each tensor's mean gradient after each epoch."""
    with drawing(file, width=6, height=4) as canvas:
        axes = canvas.add_subplot()
        for name in norms[0]:
            axes.plot(range(1, len(norms) + 1), [epoch[name] for epoch in norms], linewidth=0.7)
        axes.set_yscale("log")
        axes.set_xlabel("epoch")
        axes.set_ylabel("norm of the mean gradient, a line a tensor")
    return file


def _equal(shown: Rows, file: Path) -> Path:
    """Means and standard errors: methods down, a colour for each epsilon."""
    methods = [m for m in tuned.METHODS if any((tuned.NAME, m, b) in shown for b in tuned.EPSILONS)]
    with drawing(file, width=7, height=1 + 0.3 * len(methods)) as canvas:
        axes: Any = canvas.add_subplot()
        for place, budget in enumerate(sorted(tuned.EPSILONS)):
            for line, method in enumerate(methods):
                found = report.accuracies(finals(shown.get((tuned.NAME, method, budget), [])))
                if found:
                    mean, error = sum(found) / len(found), report.standard_error(found)
                    label = f"epsilon {budget:g}" if line == 0 else None
                    axes.errorbar(mean, -line, xerr=error, fmt="o", color=f"C{place}", label=label)
        axes.set_yticks([-line for line in range(len(methods))], methods)
        axes.set_xlabel("test accuracy, %")
        axes.legend()
    return file


def _curve(shown: Rows, figure: Figure, row: str) -> list[float]:
    cells = shown.get((figure.name, row, None), [])
    found: list[float] = next((c["public_accuracy_by_epoch"] for c in cells if "public_accuracy_by_epoch" in c), [])
    return found
