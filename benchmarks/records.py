"""Results on disk: each finished cell is written at once, and a later run skips the cells that exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.cell import Cell
from clipwise.errors import ConfigurationError
from clipwise.ledger.durable_files import replace_file

FORMAT = 1
FILE, TABLES = "results.json", "results.md"


class Results:
    """The results of one machine, in one folder.

    Attributes:
        environment: hardware and versions.
        runs: the commands that made the results, with their seeds.
        cells: by key.
    """

    def __init__(
        self, folder: Path, environment: dict[str, Any], runs: list[dict[str, Any]], cells: dict[str, Cell]
    ) -> None:
        self.environment, self.runs, self.cells = environment, runs, cells
        self._file = folder / FILE

    @classmethod
    def read(cls, folder: Path) -> Results:
        """Read the results in a folder."""
        file = folder / FILE
        if not file.exists():
            raise ConfigurationError(
                f"{folder} holds no {FILE}: measure first, with `python -m benchmarks --out {folder}`."
            )
        try:
            stored = json.loads(file.read_text())
            if stored["format"] != FORMAT:
                raise ConfigurationError(f"{file} has format {stored['format']}, not {FORMAT}: measure again.")
            return cls(folder, stored["environment"], stored["runs"], stored["cells"])
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(f"{file} is not a file of results: give another folder.") from error

    @classmethod
    def go_on(cls, folder: Path, environment: dict[str, Any]) -> Results:
        """Start new results, or continue those in the folder if they have the same environment."""
        if not (folder / FILE).exists():
            return cls(folder, environment, [], {})
        results = cls.read(folder)
        for name in sorted(environment.keys() | results.environment.keys()):
            if environment.get(name) != results.environment.get(name):
                raise ConfigurationError(
                    f"{folder} holds results with another {name} ({results.environment.get(name)}, now "
                    f"{environment.get(name)}), which do not compare: give another folder with --out."
                )
        return results

    def begin(self, command: str, seed: int) -> None:
        """Record the command that is about to run."""
        run = {"command": command, "seed": seed}
        if run not in self.runs:
            self.runs.append(run)

    def has(self, key: str, *, retry: bool) -> bool:
        """Whether a cell has a result. With `retry`, a failed cell does not count."""
        return key in self.cells and not (retry and "failed" in self.cells[key])

    def add(self, key: str, cell: Cell) -> None:
        """Add a cell and write it to disk."""
        self.cells[key] = cell
        stored = {"format": FORMAT, "environment": self.environment, "runs": self.runs, "cells": self.cells}
        text = json.dumps(stored, indent=1) + "\n"
        replace_file(self._file, lambda file: file.write(text.encode()), mode=0o644)


def key_of(setting_key: str, method: str, *, largest: bool = False) -> str:
    """The name of a cell. Figures that show the same setting share it."""
    return f"{'largest/' if largest else ''}{setting_key}/{method}"
