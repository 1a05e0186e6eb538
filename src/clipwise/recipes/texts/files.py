"""Texts that were opened: the columns of a table, or files in one folder for each class."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path

from clipwise.errors import ConfigurationError
from clipwise.recipes.labelled import ClassFolders, Records, folders_in
from clipwise.recipes.tables.read import listed, read_table

_SUFFIX = ".txt"
_WITHOUT_LABELS = ("unsup",)  # a folder of the IMDB reviews, whose texts have no label
_PARTS = {"train": ("train", "training"), "test": ("test", "val", "valid", "validation")}


class Texts(Records):
    """Texts of a file or folder."""

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


class FolderTexts(ClassFolders, Texts):
    """Text files."""

    def __init__(self, folder: Path, part: str, encoding: str | None) -> None:
        super().__init__(_of_part(folder, part), "text", (_SUFFIX,), without=_WITHOUT_LABELS)
        self._encoding = encoding
        if not self._files:
            raise ConfigurationError(
                f"{self._folder.name}: there are no texts in it. Give a folder with one sub-folder of {_SUFFIX} files "
                "for each class, or a CSV file with --text COLUMN --target COLUMN."
            )

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
    found = {entry.name.lower(): entry for entry in folders_in(folder)}
    if not found or not set(found) <= {name for names in _PARTS.values() for name in names}:
        return folder
    if len(found) == 1:
        return next(iter(found.values()))
    return next((found[name] for name in _PARTS[part] if name in found), folder)
