"""The measured points of an axis, as curves: one for each column, of time or of memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.cell import Cell
from benchmarks.methods import REFERENCE
from benchmarks.peers.table import COLUMNS
from benchmarks.peers.targets import MEMORY, TIME
from benchmarks.records import Results
from benchmarks.scaling.axes import Axis


@dataclass(frozen=True)
class Quantity:
    """A measured quantity of a step.

    Args:
        name: "time" or "memory".
        unit: the unit of the shown figures.
        field: the key in a column.
        scale: the factor from the stored value to that unit.
    """

    name: str
    unit: str
    field: str
    scale: float

    def value(self, cell: Cell, column: str) -> float | None:
        """The value in its unit, or None if it was not measured."""
        stored = cell.get("columns", {}).get(column, {}).get(self.field)
        return None if stored is None else self.scale * stored

    def ratio(self, cell: Cell, column: str) -> float | None:
        """The ratio to plain training, or None if it was not measured."""
        figures = cell.get("columns", {}).get(column, {})
        ratio: float | None = figures.get(f"{self.name}_over", {}).get(REFERENCE)
        return ratio


QUANTITIES = (Quantity(TIME, "milliseconds", "seconds", 1e3), Quantity(MEMORY, "MiB", "peak_bytes", 2.0**-20))


def measured(axis: Axis, results: Results) -> dict[int, Cell]:
    """The measured cells of an axis, by the number that grows."""
    return {x: results.cells[row.name] for x, row in axis.rows.items() if row.name in results.cells}


def columns_of(cells: dict[int, Cell]) -> list[str]:
    """The columns of all cells, in the order of tables; always with plain training."""
    found = {name for cell in cells.values() for name in cell.get("columns", {})}
    return [name for name in COLUMNS if name in found | {REFERENCE}]


def growth(cells: dict[int, Cell], quantity: Quantity, column: str) -> float | None:
    """The exponent k of x^k between the last two points: 1 is linear, 2 quadratic; below 1 overhead still counts."""
    points = [(x, value) for x, cell in cells.items() if (value := quantity.value(cell, column))]
    if len(points) < 2:
        return None
    (x, before), (last, after) = points[-2:]
    return math.log(after / before) / math.log(last / x)
