"""Figure 1 in numbers: how many epochs it takes until the validation accuracy is near that without noise."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from clipwise.reproduce.normalization.results import Results
from clipwise.reproduce.normalization.tables import FIGURE_1, Table
from clipwise.reproduce.store import Cell

NEAR = 0.02  # below the best accuracy without noise
CURVE = "validation_accuracy_by_epoch"


def curve(cells: Sequence[Cell]) -> list[float]:
    """The mean over seeds, epoch by epoch."""
    curves = [cell[CURVE] for cell in cells if CURVE in cell]
    return [statistics.fmean(epoch) for epoch in zip(*curves, strict=False)]


def epochs_to(target: float, accuracies: Sequence[float]) -> int | None:
    """After how many epochs the target is reached; None if never."""
    return next((epoch for epoch, value in enumerate(accuracies, 1) if value >= target), None)


def lines(table: Table, found: Results) -> Iterator[str]:
    """A Markdown table of epochs by noise, and what noise 10 costs against noise 1."""
    method = FIGURE_1[table.name]
    yield "| network | " + " | ".join(f"noise {value:g}" for value in table.values) + " |"
    yield "|---" * (1 + len(table.values)) + "|"
    remarks = []
    for family in table.families:
        curves = {value: curve(found.get((family, method, value), [])) for value in table.values}
        if not curves[table.values[0]]:
            continue
        target = max(curves[table.values[0]]) - NEAR
        epochs = {value: epochs_to(target, accuracies) for value, accuracies in curves.items() if accuracies}
        told = (
            str(epochs[v] or f"not within {len(curves[v])}") if v in epochs else "not run" for v in curves
        )
        yield f"| {family}, {method} | " + " | ".join(told) + " |"
        slow, fast = epochs.get(10.0), epochs.get(1.0)
        if 10.0 in epochs and fast is not None:
            cost = "more than the run" if slow is None else f"{slow / fast:.1f} times"
            remarks.append(
                f"- {family}: noise 10 takes {cost} as many epochs as noise 1 (paper: about 7 times)."
            )
    yield from ["", *remarks] if remarks else []
