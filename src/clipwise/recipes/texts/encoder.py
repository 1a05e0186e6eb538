"""The fixed encoding of texts: hashed words, or sentence embeddings of a public pretrained network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise.errors import ConfigurationError
from clipwise.recipes.kind import Source
from clipwise.recipes.labelled import LabelledEncoder
from clipwise.recipes.linear import LinearOnFeatures, LinearOnHashedWords
from clipwise.recipes.texts import sentences
from clipwise.recipes.texts.defaults import HASHED_WORDS, PLACES, SENTENCES
from clipwise.recipes.texts.hashing import TOKENS, hashed
from clipwise.validation.arguments import one_of

if TYPE_CHECKING:
    from clipwise.recipes.texts.files import Texts

MODELS = (HASHED_WORDS, SENTENCES)
_HOW = {
    HASHED_WORDS: "Words and pairs of words are hashed into {places} places by a public function. No vocabulary.",
    SENTENCES: "Texts are embedded by all-MiniLM-L6-v2, a public pretrained network (SHA-256 of its weights: {sha}).",
}


@dataclass(frozen=True)
class TextEncoder(LabelledEncoder):
    """How a text becomes the input of a model.

    Args:
        labels: the classes.
        text, target: the columns of the text and of the label; None for a folder of text files.
        encoding: of the files; None for UTF-8 or that of the byte order mark.
        about_labels: how the labels are known, for the statement.
        model_name: "hashed-words" or "sentences".
        places: of hashed words.
    """

    labels: tuple[str, ...]
    text: str | None = None
    target: str | None = None
    encoding: str | None = None
    about_labels: str = ""
    model_name: str = HASHED_WORDS
    places: int = PLACES
    kind: ClassVar[str] = "text"
    models: ClassVar[tuple[str, ...]] = MODELS

    @property
    def preprocessing(self) -> tuple[str, ...]:  # type: ignore[override]
        """Lines for the statement."""
        how = _HOW[self.model_name].format(places=self.places, sha=sentences.WEIGHTS_SHA256)
        return (self.about_labels, how) if self.about_labels else (how,)

    def encode(self, source: Source, rows: np.ndarray | None = None) -> TensorDataset:
        texts = self._texts(source)
        rows = np.arange(len(source)) if rows is None else np.asarray(rows)
        found = texts.targets(rows, self.labels)
        return TensorDataset(*self.features(texts.texts(rows)), found)

    def inputs(self, source: Source) -> tuple[Tensor, ...]:
        return self.features(self._texts(source).texts(np.arange(len(source))))

    def features(self, texts: Sequence[str]) -> tuple[Tensor, ...]:
        """The inputs of these texts."""
        return (sentences.embedded(texts),) if self.model_name == SENTENCES else hashed(texts, self.places)

    def _texts(self, source: Source) -> Texts:
        from clipwise.recipes.texts.source import TextSource

        if not isinstance(source, TextSource):
            raise ConfigurationError(f"This model takes texts, and the data are of the kind {source.kind!r}.")
        return source.records

    def model(self, name: str) -> nn.Module:
        one_of("model", name, MODELS)
        if name != self.model_name:
            raise ConfigurationError(
                f"model={name!r}: this encoding is for {self.model_name!r}: use for_model({name!r})."
            )
        if name == SENTENCES:
            return LinearOnFeatures(sentences.SIZE, len(self.labels))
        return LinearOnHashedWords(self.places, len(self.labels))

    def synthetic(self, rows: int) -> TensorDataset:
        labels = torch.arange(rows) % len(self.labels)
        if self.model_name == SENTENCES:
            return TensorDataset(torch.randn(rows, sentences.SIZE).bfloat16(), labels)
        ids = torch.randint(self.places, (rows, TOKENS), dtype=torch.int32)
        return TensorDataset(ids, torch.randn(rows, TOKENS), labels)

    def to_dict(self) -> dict[str, Any]:
        found = {key: value for key, value in asdict(self).items() if value is not None}
        return found | {"kind": self.kind, "labels": list(self.labels)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TextEncoder:
        return cls(
            tuple(data["labels"]),
            data.get("text"),
            data.get("target"),
            data.get("encoding"),
            str(data["about_labels"]),
            str(data["model_name"]),
            int(data["places"]),
        )

    def open(self, path: Path, encoding: str | None = None) -> Source:
        """Further texts, which need no labels. Of a folder with a training and a test part this is the test part."""
        from clipwise.recipes.texts.source import TextSource

        return TextSource(
            path,
            self.text,
            self.target,
            labels=self.labels,
            encoding=encoding or self.encoding,
            part="test",
            needs_target=False,
        )
