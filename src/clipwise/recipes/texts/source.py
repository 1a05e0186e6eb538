"""Texts as a source of `clipwise train`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from clipwise.errors import ConfigurationError
from clipwise.recipes.class_labels import require_labels
from clipwise.recipes.kind import ASSUMED_LABELS, Settings
from clipwise.recipes.labelled import LabelledSource
from clipwise.recipes.texts import sentences
from clipwise.recipes.texts.defaults import HASHED_WORDS, SENTENCES, text_settings
from clipwise.recipes.texts.encoder import MODELS, TextEncoder
from clipwise.recipes.texts.files import FolderTexts, TableTexts, Texts, is_texts

if TYPE_CHECKING:
    from clipwise.recipes.counts import NoisedCounts


class TextSource(LabelledSource):
    """A column of texts in a CSV or Parquet file, or a folder with one sub-folder of text files for each class.

    Args:
        path: of the file or folder.
        text, target: the columns of the text and of the label, for a file.
        labels: the classes, if they are declared. Not needed for sub-folders, which state them.
        encoding: of the files; by default UTF-8, or that of the byte order mark of a CSV file.
        model: "hashed-words" or "sentences", if the user chose one.
        part: "train" or "test", for a folder with both.
        needs_target: whether the column of labels must be there.
    """

    kind: ClassVar[str] = "text"

    def __init__(
        self,
        path: Path | str,
        text: str | None = None,
        target: str | None = None,
        *,
        labels: Sequence[str] | None = None,
        encoding: str | None = None,
        model: str | None = None,
        part: str = "train",
        needs_target: bool = True,
    ) -> None:
        path = Path(path)
        if not path.exists():
            raise ConfigurationError(f"{path.name}: there is no such file or folder.")
        self._columns = (None, None) if path.is_dir() else (text, target)
        self.declared = None if labels is None else require_labels(labels)
        self._encoding, self._model = encoding, model
        self.records: Texts = _opened(path, text, target, encoding, part, needs_target)
        self.description = self.records.description

    @staticmethod
    def recognises(path: Path) -> bool:
        """Whether the path is a folder of texts. A column of a file is text if the user names it."""
        return is_texts(path)

    @property
    def models(self) -> tuple[str, ...]:
        return MODELS

    def require_readable(self, rows: np.ndarray) -> None:
        self.records.texts(rows.tolist())

    def defaults(self, rows: int, epsilon: float, preset: str) -> Settings:
        settings = text_settings(rows, epsilon, preset, self._model)
        if settings.model == SENTENCES and not sentences.available():
            raise ConfigurationError(
                "The model of sentence embeddings is not installed: pip install 'clipwise-dp[text]', or take "
                f"--model {HASHED_WORDS}."
            )
        return settings

    def largest(self, rows: int, counts: NoisedCounts) -> TextEncoder:
        return TextEncoder(ASSUMED_LABELS)

    def prepare(self, rows: np.ndarray, counts: NoisedCounts | None) -> TextEncoder:
        how_to = "Name their column with --target, or put text files into one sub-folder for each class."
        labels, about_labels = self.labels_of(rows, counts, how_to)
        return TextEncoder(labels, *self._columns, self._encoding, about_labels, self._model or HASHED_WORDS)


def _opened(
    path: Path, text: str | None, target: str | None, encoding: str | None, part: str, needs_target: bool
) -> Texts:
    if path.is_dir():
        return FolderTexts(path, part, encoding)
    if text is None:
        raise ConfigurationError(f"{path.name}: name the column of the text with --text COLUMN.")
    if target is None and needs_target:
        raise ConfigurationError(f"{path.name}: name the column of the labels with --target COLUMN.")
    return TableTexts(path, text, target, encoding, needs_target)
