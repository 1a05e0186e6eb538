"""From the store to the entries of a table."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.harness.paper import key_of
from experiments.harness.store import Cell, Store
from experiments.normalization.setting import Setting
from experiments.normalization.tables import TABLES, Table, quick

Place = tuple[str, str, float]  # family, method, value
Results = dict[Place, list[Cell]]


def best_of(trials: Sequence[Cell]) -> int | None:
    """The index of the trial with the best validation accuracy, the first of equal ones."""
    found = [(cell["accuracy"], -place) for place, cell in enumerate(trials) if "accuracy" in cell]
    return -max(found)[1] if found else None


def tables_of(is_quick: bool) -> tuple[Table, ...]:
    """The tables as they are run."""
    return tuple(quick(table) for table in TABLES) if is_quick else TABLES


def results(table: Table, store: Store) -> Results:
    """The test runs of each entry that has any; a failed trial if all trials failed."""
    tested: dict[str, list[Cell]] = {}
    for cell in store.cells.values():
        if cell["judged_by"] == "test":
            tested.setdefault(cell["setting"], []).append(cell)
    found: Results = {}
    for family in table.families:
        for method in table.methods:
            for value in table.values:
                cells = _entry(table.tried(family, method, value), store, tested)
                if cells:
                    found[family, method, value] = cells
    return found


def _entry(tried: list[Setting], store: Store, tested: dict[str, list[Cell]]) -> list[Cell]:
    if len(tried) == 1:
        return tested.get(tried[0].key, [])
    trials = [store.cells.get(key_of(setting, "validation", 0)) for setting in tried]
    finished = [cell for cell in trials if cell is not None]
    if len(finished) < len(tried):
        return []  # not all trials have finished
    best = best_of(finished)
    return finished[:1] if best is None else tested.get(tried[best].key, [])
