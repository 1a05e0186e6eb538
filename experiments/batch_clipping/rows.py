"""Finished runs by row; only the runs with the most epochs count."""

from __future__ import annotations

from collections.abc import Iterable

from experiments.harness.store import Cell

Rows = dict[tuple[str, str, float | None], list[Cell]]  # by figure, row and budget


def rows_of(cells: Iterable[Cell], quick: bool) -> Rows:
    """The runs of each row with the most epochs. A run may be in several figures."""
    found: Rows = {}
    for cell in cells:
        for place in cell["shown"]:
            if place["quick"] == quick:
                key = (place["figure"], place["row"], place.get("budget"))
                found.setdefault(key, []).append(cell | {"epochs_asked": place["epochs_asked"]})
    return {key: _longest(runs) for key, runs in found.items()}


def epochs(cells: list[Cell], in_paper: int | None) -> str:
    """The number of epochs of the runs, and of the paper if it has more."""
    full = in_paper or cells[0]["epochs_asked"]
    return f"{cells[0]['epochs']}" + (f" of {full}" if cells[0]["epochs"] < full else "")


def seeds(cells: list[Cell]) -> str:
    """The seeds of the runs that have an accuracy."""
    return ", ".join(str(seed) for seed in sorted(cell["seed"] for cell in cells if "accuracy" in cell))


def _longest(runs: list[Cell]) -> list[Cell]:
    """Prefers finished runs."""
    finished = [cell for cell in runs if "accuracy" in cell] or runs
    most = max(cell["epochs"] for cell in finished)
    return [cell for cell in finished if cell["epochs"] == most]
