"""The runs of a store, looked up by where they are shown."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.harness.store import Cell


class Shown:
    """Runs by figure, row and budget, of quick pages or of the others."""

    def __init__(self, cells: Mapping[str, Cell], quick: bool) -> None:
        self.cells, self.quick = cells, quick
        self._shown: dict[tuple[str, str, float | None], list[Cell]] = {}
        for cell in cells.values():
            for place in cell.get("shown", []):
                if bool(place.get("quick")) == quick:
                    key = (place["figure"], place["row"], place.get("budget"))
                    self._shown.setdefault(key, []).append(cell)

    def has(self, figure: str) -> bool:
        """Whether anything of a figure was run."""
        return any(name == figure for name, _, _ in self._shown)

    def at(self, figure: str, row: str, epsilon: float | None = None) -> list[Cell]:
        """All runs of one place."""
        return self._shown.get((figure, row, epsilon), [])
