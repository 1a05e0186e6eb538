"""What a kind of data gives `clipwise train`: a source of records, and the fixed encoding of a record as tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise.errors import ConfigurationError
from clipwise.sampling.augmentation import Views

if TYPE_CHECKING:
    from clipwise.recipes.counts import NoisedCounts


ASSUMED_LABELS = tuple(map(str, range(10)))


@dataclass(frozen=True)
class Task:
    """What a model predicts: one of `labels`, or a number in `range`."""

    labels: tuple[str, ...] | None = None
    range: tuple[float, float] | None = None


@dataclass(frozen=True)
class Settings:
    """The settings of a training run. Each can be overridden by a flag or the configuration file.

    Args:
        model: the name of the model, an argument of `Encoder.model`.
        batch_size: the expected number of records per step.
        epochs: the number of passes over the training rows.
        learning_rate: of the optimizer.
        optimizer: "sgd", "adam" or "adamw".
        momentum: of "sgd".
        weight_decay: of the optimizer.
        max_norm: the clipping norm of the gradient of one record.
        ema: the decay of the average of the released parameters, or None.
        views: the number of random views of each record in a step; 1 for no augmentation.
        counts_share: the share of the privacy budget for noised counts of the preparation.
    """

    model: str
    batch_size: int
    epochs: float
    learning_rate: float
    optimizer: str = "sgd"
    momentum: float = 0.9
    weight_decay: float = 0.0
    max_norm: float = 1.0
    ema: float | None = None
    views: int = 1
    counts_share: float = 0.0


class Source(ABC):
    """Records on disk. Opening them reads no record. Indices are positions in the file or in the sorted list of files.

    Attributes:
        kind: "table", "images", "text" or "function".
        has_figures: whether figures of accuracy are possible.
        augmented_models: the models whose records can be augmented.
        description: one line for the statement: the format and the columns by name, without values.
    """

    kind: ClassVar[str]
    has_figures: ClassVar[bool] = True
    augmented_models: ClassVar[tuple[str, ...]] = ()
    description: str

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def needs_counts(self) -> bool:
        """Whether `prepare` must release noised counts, because something that it needs is not declared."""

    @property
    @abstractmethod
    def models(self) -> tuple[str, ...]:
        """The names of the models that can be trained on the data."""

    def require_groups(self, column: str) -> None:
        """Raise if accuracies by the categories of a column are not possible, before anything is released."""
        raise ConfigurationError(
            f"--groups {column!r} is not possible: data of the kind {self.kind!r} have no columns with declared "
            "categories."
        )

    @abstractmethod
    def defaults(self, rows: int, epsilon: float, preset: str) -> Settings:
        """The settings for this many training rows and this budget, before anything is released.

        `preset` is "fast" or "best". `epsilon` is infinity without privacy.
        """

    def largest(self, rows: int, counts: NoisedCounts) -> Encoder | None:
        """An encoding as large as noised counts of this many rows can make it, for estimates of time and memory.

        Nothing is counted. If the labels are not declared, they are assumed to be `ASSUMED_LABELS`.
        """
        return None

    def require_readable(self, rows: np.ndarray) -> None:
        """Raise if one of these records cannot be read, where they are read later than the source is opened."""
        return

    @abstractmethod
    def prepare(self, rows: np.ndarray, counts: NoisedCounts | None) -> Encoder:
        """Fix the encoding from declared facts, and from noised counts of these rows alone."""


class Encoder(ABC):
    """A fixed encoding: how a record becomes tensors. It is plain data, saved with the run and loaded by `predict`.

    Attributes:
        kind: that of the source.
        task: what the model predicts.
        preprocessing: lines for the statement: what was declared, and what was released with noise.
    """

    kind: ClassVar[str]
    task: Task
    preprocessing: tuple[str, ...]

    @abstractmethod
    def encode(self, source: Source, rows: np.ndarray | None = None) -> TensorDataset:
        """The tensors of these rows, or of all rows: the inputs, then the target."""

    @abstractmethod
    def inputs(self, source: Source) -> tuple[Tensor, ...]:
        """The inputs of all rows, without the target."""

    def for_model(self, name: str) -> Encoder:
        """The encoding that suits a model: some take fixed features of a record."""
        return self

    @abstractmethod
    def model(self, name: str) -> nn.Module:
        """A model with new weights."""

    def synthetic(self, rows: int) -> TensorDataset | None:
        """Synthetic rows with the shapes of `encode`, for estimates of time and memory; None if there are none."""
        return None

    def groups(self, source: Source, column: str, rows: np.ndarray | None) -> tuple[tuple[str, ...], np.ndarray]:
        """The categories of a column, which are declared or released, and the index of that of each row."""
        raise ConfigurationError(
            f"--groups {column!r} is not possible: data of the kind {self.kind!r} have no columns."
        )

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """One loss per example."""

    def views(self, count: int) -> Views | None:
        """The augmentation with this many views of each record; None if the kind has none."""
        return None

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The encoding in types that TOML and JSON share."""

    @classmethod
    @abstractmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Encoder:
        """The inverse of `to_dict`."""

    @abstractmethod
    def open(self, path: Path) -> Source:
        """Further data of the same kind, with the columns or the layout of the training data."""
