"""What images and texts share: records with a label, perhaps in one folder for each class."""

from __future__ import annotations

import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from torch import Tensor

from clipwise.errors import ConfigurationError
from clipwise.recipes.class_labels import label_losses, released_labels, require_labels, targets
from clipwise.recipes.kind import Encoder, Source, Task
from clipwise.validation.arguments import one_of

if TYPE_CHECKING:
    from typing_extensions import Self

    from clipwise.recipes.counts import NoisedCounts


class Records(ABC):
    """Images or texts of a folder or file.

    Attributes:
        description: one line about the format, with the names of columns and without values.
        names: the classes if the layout states them; else None.
        byte_labels: whether the format allows the labels 0 to 255 only.
    """

    description: str
    names: tuple[str, ...] | None = None
    byte_labels: bool = False

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def labels(self) -> list[str | None] | None:
        """The label of each record; None if there are none."""

    def targets(self, rows: np.ndarray, labels: Sequence[str]) -> Tensor:
        """The positions of the labels of these rows."""
        values = self.labels()
        if values is None:
            raise ConfigurationError(f"{self.description}: it has no labels to learn or to compare with.")
        return targets([values[row] for row in rows.tolist()], labels)


class ClassFolders(Records):
    """Files in one folder for each class, or in a single folder without labels.

    `without`: the folders that are no classes.
    """

    def __init__(self, folder: Path, what: str, suffixes: Sequence[str], without: Sequence[str] = ()) -> None:
        # File systems differ in how they compose accents.
        found = (entry for entry in folders_in(folder) if entry.name not in without)
        classes = sorted((unicodedata.normalize("NFC", entry.name), entry) for entry in found)
        self._folder = folder
        self._files = [(name, file) for name, entry in classes for file in _files(entry, suffixes)]
        if self._files:
            self.names = tuple(name for name, _ in classes)
            self.description = f"{what} files, one folder for each class"
        else:
            self._files = [("", file) for file in _files(folder, suffixes)]
            self.description = f"{what} files without labels"

    def __len__(self) -> int:
        return len(self._files)

    def labels(self) -> list[str | None] | None:
        return None if self.names is None else [name for name, _ in self._files]


class LabelledSource(Source):
    """Records whose labels are declared, public by their layout, or released as noised counts."""

    records: Records
    declared: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.records)

    def needs_counts(self) -> bool:
        return self.declared is None and self.records.names is None

    def labels_of(self, rows: np.ndarray, counts: NoisedCounts | None, how_to: str) -> tuple[tuple[str, ...], str]:
        """The labels, and a line about them for the statement. `how_to` says how to give missing ones."""
        values = self.records.labels()
        if values is None:
            raise ConfigurationError(f"{self.description}: it has no labels. {how_to}")
        if self.declared is not None:
            return self.declared, "The labels are declared."
        if self.records.names is not None:
            named = "names of the sub-folders" if "folder" in self.description else "classes of this data set"
            return require_labels(self.records.names), f"The labels are the {named}, which are taken as public."
        found = released_labels([values[row] for row in rows.tolist()], counts, self.records.byte_labels)
        what = self.kind.removesuffix("s")
        return found, f"The labels are released as noised counts of the training {what}s, within the budget."


class LabelledEncoder(Encoder):
    """An encoding of records with labels, for one of several models."""

    models: ClassVar[tuple[str, ...]]
    labels: tuple[str, ...]
    model_name: str

    @property
    def task(self) -> Task:  # type: ignore[override]
        """One of the labels."""
        return Task(labels=self.labels)

    def for_model(self, name: str) -> Self:
        return replace(self, model_name=one_of("model", name, self.models))  # type: ignore[type-var]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return label_losses(output, target)


def folders_in(folder: Path) -> list[Path]:
    """The visible sub-folders."""
    return [entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]


def _files(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    found = (file for file in folder.rglob("*") if file.suffix.lower() in suffixes and file.is_file())
    shown = (file for file in found if not file.name.startswith("."))
    return sorted(shown, key=lambda file: file.relative_to(folder).as_posix())
