"""Results on disk: each finished run is written at once, and a later command skips it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from clipwise.errors import ConfigurationError
from clipwise.ledger.durable_files import replace_file

FORMAT, FILE = 1, "results.json"
Cell = dict[str, Any]


class Store:
    """The runs of one folder.

    An accuracy does not depend on the machine, so a folder may have runs of several machines. Each run names its
    environment.

    Attributes:
        commands: the commands that made the runs.
        environments: hardware and versions; a run has the index of one.
        cells: the runs, by key. Each has its places (`shown`), and an accuracy, or the reason why it `failed`, or its
            progress if it is `unfinished`.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE
        self.commands: list[str] = []
        self.environments: list[dict[str, Any]] = []
        self.cells: dict[str, Cell] = {}
        if self._file.exists():
            self._read()

    def begin(self, command: str, environment: dict[str, Any]) -> None:
        """Set the command and the environment. Both are written with the first run."""
        self._command, self._environment = command, environment

    def add(self, key: str, cell: Cell) -> None:
        """Add a run and write it to disk. It inherits the places of an earlier run with the same key."""
        if self._command not in self.commands:
            self.commands.append(self._command)
        shown = self.cells.get(key, {}).get("shown", [])
        self.cells[key] = cell | {"environment": self._place_of(self._environment), "shown": shown}
        self._write()

    def show(self, key: str, place: dict[str, Any]) -> None:
        """Add a place to a run."""
        shown = self.cells[key]["shown"]
        if place not in shown:
            shown.append(place)
            self._write()

    def take(self, other: Store) -> None:
        """Copy the runs of another folder. A finished run replaces an unfinished one with the same key."""
        for key, cell in other.cells.items():
            mine = self.cells.get(key)
            if mine is not None and not ("unfinished" in mine and "unfinished" not in cell):
                cell = mine | {"shown": mine["shown"] + [p for p in cell["shown"] if p not in mine["shown"]]}
                self.cells[key] = cell
                continue
            place = self._place_of(other.environments[cell["environment"]])
            earlier = mine["shown"] if mine else []
            shown = earlier + [p for p in cell["shown"] if p not in earlier]
            self.cells[key] = cell | {"environment": place, "shown": shown}
        self.commands += [command for command in other.commands if command not in self.commands]
        self._write()

    def _place_of(self, environment: dict[str, Any]) -> int:
        if environment not in self.environments:
            self.environments.append(environment)
        return self.environments.index(environment)

    def _write(self) -> None:
        about = {"format": FORMAT, "commands": self.commands, "environments": self.environments}
        # One run per line keeps files and diffs readable.
        runs = [f"  {json.dumps(key)}: {json.dumps(cell, separators=(',', ':'))}" for key, cell in self.cells.items()]
        cells = "{\n" + ",\n".join(runs) + "\n }" if runs else "{}"
        text = json.dumps(about, indent=1).removesuffix("\n}") + f',\n "cells": {cells}\n}}\n'
        replace_file(self._file, lambda file: file.write(text.encode()), mode=0o644)

    def _read(self) -> None:
        try:
            stored = json.loads(self._file.read_text())
            if stored["format"] != FORMAT:
                raise ValueError
            self.commands, self.environments = stored["commands"], stored["environments"]
            self.cells = stored["cells"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{self._file} is not a results file of this command: give another folder with --out."
            ) from error
