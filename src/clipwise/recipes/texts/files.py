"""Texts that were opened: the columns of a table, or files in one folder for each class."""

from __future__ import annotations

import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

from clipwise.errors import ConfigurationError
from clipwise.recipes.tables.read import listed, read_table

_SUFFIX = ".txt"
_WITHOUT_LABELS = ("unsup",)  # a folder of the IMDB reviews, whose texts have no label
_PARTS = {"train": ("train", "training"), "test": ("test", "val", "valid", "validation")}


class Texts(ABC):
    """Texts of a file or folder.

    Attributes:
        description: one line about the format, with the names of columns and without values.
        names: the classes if the layout states them; else None.
    """

    description: str
    names: tuple[str, ...] | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def labels(self) -> list[str | None] | None:
        """The label of each text; None if there are none."""

    @abstractmethod
    def texts(self, rows: Iterable[int]) -> list[str]:
        """The texts of these rows."""


class TableTexts(Texts):
    """A column of texts, and a column of labels if it is there."""

    def __init__(self, path: Path, text: str, target: str | None, encoding: str | None, needs_target: bool) -> None:
        table = read_table(path, encoding)
        wanted = [("--text", text)] + ([("--target", target)] if target is not None and needs_target else [])
        for flag, name in wanted:
            if name not in table.columns:
                raise ConfigurationError(
                    f"{flag} {name!r} is no column of {path.name}. Its columns are {listed(table.columns)}."
                )
        if text == target:
            raise ConfigurationError(f"--text and --target both name the column {text}.")
        self._text = table.columns[text]
        self._target = None if target is None else table.columns.get(target)
        self._rows = table.rows
        about = "" if self._target is None else f", label: column {target!r}"
        self.description = f"{table.format} file, text: column {text!r}{about}"

    def __len__(self) -> int:
        return self._rows

    def labels(self) -> list[str | None] | None:
        if self._target is None:
            return None
        cells = [cell.strip() or None for cell in self._target.cells]
        return [cells[code] for code in self._target.codes_N.tolist()]

    def texts(self, rows: Iterable[int]) -> list[str]:
        return [self._text.cells[self._text.codes_N[row]] for row in rows]


class FolderTexts(Texts):
    """Text files in one folder for each class, or in a single folder without labels."""

    def __init__(self, folder: Path, part: str, encoding: str | None) -> None:
        folder = _of_part(folder, part)
        classes = sorted((unicodedata.normalize("NFC", entry.name), entry) for entry in _folders(folder))
        self._folder, self._encoding = folder, encoding
        self._files = [(name, file) for name, entry in classes for file in _files(entry)]
        self.description = "text files, one folder for each class"
        if self._files:
            self.names = tuple(name for name, _ in classes)
        else:
            self._files = [("", file) for file in _files(folder)]
            self.description = "text files without labels"
        if not self._files:
            raise ConfigurationError(
                f"{folder.name}: there are no texts in it. Give a folder with one sub-folder of {_SUFFIX} files for "
                "each class, or a CSV file with --text COLUMN --target COLUMN."
            )

    def __len__(self) -> int:
        return len(self._files)

    def labels(self) -> list[str | None] | None:
        return None if self.names is None else [name for name, _ in self._files]

    def texts(self, rows: Iterable[int]) -> list[str]:
        return [self._read(self._files[row][1]) for row in rows]

    def _read(self, file: Path) -> str:
        try:
            return file.read_text(encoding=self._encoding or "utf-8-sig")
        except (UnicodeError, LookupError, OSError):
            raise ConfigurationError(
                f"{file.relative_to(self._folder)} is not text in {self._encoding or 'UTF-8'}: give --encoding, or "
                "take the file out of the folder."
            ) from None


def is_texts(path: Path) -> bool:
    """Whether the path is a folder of text files."""
    return path.is_dir() and any(next(path.glob(f"{'*/' * depth}*{_SUFFIX}"), None) for depth in range(3))


def _of_part(folder: Path, part: str) -> Path:
    """The folder of the part if there are folders of parts and no others."""
    found = {entry.name.lower(): entry for entry in _folders(folder)}
    if not found or not set(found) <= {name for names in _PARTS.values() for name in names}:
        return folder
    if len(found) == 1:
        return next(iter(found.values()))
    return next((found[name] for name in _PARTS[part] if name in found), folder)


def _folders(folder: Path) -> list[Path]:
    found = (entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    return [entry for entry in found if entry.name not in _WITHOUT_LABELS]


def _files(folder: Path) -> list[Path]:
    found = (file for file in folder.rglob(f"*{_SUFFIX}") if file.is_file() and not file.name.startswith("."))
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())
