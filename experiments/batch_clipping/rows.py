"""Finished runs by row: of runs of several lengths the longest count."""

from __future__ import annotations

from collections.abc import Iterable

from experiments.harness.store import Cell

Rows = dict[tuple[str, str, float | None], list[Cell]]  # by figure, row and budget


def rows_of(cells: Iterable[Cell], quick: bool) -> Rows:
    """The runs of each row; a run may be in several figures. Of runs of several lengths only the longest count."""
    found: Rows = {}
    for cell in cells:
        for place in cell["shown"]:
            if place["quick"] == quick:
                key = (place["figure"], place["row"], place.get("budget"))
                found.setdefault(key, []).append(cell | {"epochs_asked": place["epochs_asked"]})
    return {key: _longest(runs) for key, runs in found.items()}


def epochs(cells: list[Cell], in_paper: int | None) -> str:
    """How long the runs were, and of how many epochs that is a part."""
    full = in_paper or cells[0]["epochs_asked"]
    return f"{cells[0]['epochs']}" + (f" of {full}" if cells[0]["epochs"] < full else "")


def seeds(cells: list[Cell]) -> str:
    """The seeds of the runs that have an accuracy."""
    return ", ".join(str(seed) for seed in sorted(cell["seed"] for cell in cells if "accuracy" in cell))


def _longest(runs: list[Cell]) -> list[Cell]:
    """Finished runs go before unfinished ones."""
    finished = [cell for cell in runs if "accuracy" in cell] or runs
    most = max(cell["epochs"] for cell in finished)
    return [cell for cell in finished if cell["epochs"] == most]
