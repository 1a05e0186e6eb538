"""The folder of a run, runs/NAME: its files, their names, and how they are written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save
from torch import Tensor

from clipwise.errors import ConfigurationError
from clipwise.ledger.durable_files import replace_file
from clipwise.recipes import toml
from clipwise.report.page import FILE as REPORT
from clipwise.report.record import CONFIG, EVALUATION, LEDGER, METRICS


def fresh_folder(wanted: Path) -> Path:
    """`wanted`, or the first of `wanted-2`, `wanted-3`, ... that does not exist: no ledger is overwritten."""
    number = 1
    folder = wanted
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            if folder.is_dir() and not any(folder.iterdir()):
                return folder
            number += 1
            folder = wanted.with_name(f"{wanted.name}-{number}")
        except OSError as error:
            raise ConfigurationError(f"--out: {folder} cannot be written ({error.strerror}).") from error


class _File:
    """A file of this name in the folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder, owner: type[RunFolder]) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """The files of a run."""

    path: Path

    # The settings of the run, and the encoding of its data.
    config = _File(CONFIG)
    # Progress and released figures, one JSON object per line.
    metrics = _File(METRICS)
    # The releases on the training rows, and those on the held-out rows.
    ledger, evaluation_ledger = _File(LEDGER), _File(EVALUATION)
    # The weights that the run released.
    model = _File("model.safetensors")
    # Weights, optimizer and position, to resume from.
    checkpoint = _File("checkpoint.pt")
    # The secrets of a run that was interrupted. `make_private` deletes the file as soon as it is read.
    secrets = _File("ledger.resume")
    # The page about the run.
    report = _File(REPORT)

    @classmethod
    def existing(cls, path: Path) -> RunFolder:
        """The folder of a run that `clipwise train` has begun. Raises if it is none."""
        folder = cls(path)
        if not folder.config.is_file():
            raise ConfigurationError(
                f"{path} is not the folder of a run: it has no {folder.config.name}. Give a folder that `clipwise "
                "train` wrote."
            )
        return folder

    @property
    def is_finished(self) -> bool:
        """Whether the training has ended."""
        return self.model.is_file()

    def read_config(self) -> dict[str, Any]:
        """The content of config.toml."""
        return toml.read(self.config)

    def write_config(self, content: Mapping[str, Any]) -> None:
        """Write config.toml so that a crash leaves the old file or the new one."""
        text = toml.text_of(content).encode()
        replace_file(self.config, lambda file: file.write(text), mode=0o644)

    def discard(self) -> None:
        """Remove the folder of a run that has released nothing."""
        for file in (self.config, self.ledger, self.secrets):
            file.unlink(missing_ok=True)
        with suppress(OSError):  # something else is in it
            self.path.rmdir()

    def record(self, kind: str, **values: Any) -> dict[str, Any]:
        """Append a line to metrics.jsonl. All values must be public, or released with noise."""
        line = {"kind": kind, **values}
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n")
        return line

    def released(self) -> list[dict[str, Any]]:
        """The released figures in metrics.jsonl."""
        return self._lines("released")

    def progress(self) -> list[dict[str, Any]]:
        """The lines about progress in metrics.jsonl."""
        return self._lines("progress")

    def _lines(self, kind: str) -> list[dict[str, Any]]:
        if not self.metrics.is_file():
            return []
        lines = [json.loads(line) for line in self.metrics.read_text(encoding="utf-8").splitlines()]
        return [line for line in lines if line["kind"] == kind]

    def save_model(self, state: Mapping[str, Tensor]) -> None:
        """Write the weights."""
        data = save({name: value.detach().cpu().contiguous().clone() for name, value in state.items()})
        replace_file(self.model, lambda file: file.write(data), mode=0o644)

    def load_model(self) -> dict[str, Tensor]:
        """Read the weights."""
        if not self.is_finished:
            raise ConfigurationError(
                f"{self.path} has no {self.model.name}: its training has not ended. Continue it with `clipwise train "
                f"--resume {self.path}`."
            )
        found: dict[str, Tensor] = load_file(self.model)
        return found
