"""Results on disk: each finished run is written at once, and a later command skips what is there."""

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

    An accuracy does not depend on the machine, so runs of several machines may lie together; each says where it
    was made.

    Attributes:
        commands: that made the runs.
        environments: hardware and versions; a run names one by its place.
        cells: the runs, by key. Each has where it is `shown`, and an accuracy, or why it `failed`, or that it is
            `unfinished` and how far it came.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE
        self.commands: list[str] = []
        self.environments: list[dict[str, Any]] = []
        self.cells: dict[str, Cell] = {}
        if self._file.exists():
            self._read()

    def begin(self, command: str, environment: dict[str, Any]) -> None:
        """Say which command is about to run, and where. Both are noted with the first run that it makes."""
        self._command, self._environment = command, environment

    def add(self, key: str, cell: Cell) -> None:
        """Keep a run, on disk at once. Where an earlier one with this key was shown, this one is."""
        if self._command not in self.commands:
            self.commands.append(self._command)
        shown = self.cells.get(key, {}).get("shown", [])
        self.cells[key] = cell | {"environment": self._place_of(self._environment), "shown": shown}
        self._write()

    def show(self, key: str, place: dict[str, Any]) -> None:
        """Note a place where a run is shown."""
        shown = self.cells[key]["shown"]
        if place not in shown:
            shown.append(place)
            self._write()

    def take(self, other: Store) -> None:
        """Take the runs of another folder over. Of runs with one key, a finished one goes before an unfinished one."""
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
        # A run a line: a thousand of them stay readable, and a change shows which ones it is about.
        runs = [
            f"  {json.dumps(key)}: {json.dumps(cell, separators=(',', ':'))}"
            for key, cell in self.cells.items()
        ]
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
                f"{self._file} is not a file of such results: give another folder with --out."
            ) from error
