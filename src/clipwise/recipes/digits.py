"""Handwritten digits that ship with clipwise, so that a first private run needs no download."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clipwise.errors import ConfigurationError
from clipwise.recipes.kind import Encoder, Settings, Source, Task
from clipwise.recipes.small_cnn import small_cnn

EMBEDDED = "digits"
_FILE = Path(__file__).with_name("digits.npz")
_TEST_EVERY = 5
_BRIGHTEST = 16  # a pixel counts the inked points of a 4x4 block


def digits(train: bool) -> TensorDataset:
    """1797 images of handwritten digits, 8x8 grey pixels: 1437 to train on, or the other 360 to test on.

    They are the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak
    (UCI Machine Learning Repository, 1998, https://doi.org/10.24432/C50P49, CC BY 4.0), as scikit-learn
    distributes it. Images and labels are unchanged and in their original order.

    Every fifth record, beginning with the first, is a test record. The split depends on the position alone, so it
    costs no privacy.

    Args:
        train: whether to return the training part.

    Returns:
        Images, float32 [N, 1, 8, 8] from 0 to 1, and labels, int64 [N] from 0 to 9.
    """
    with np.load(_FILE) as file:
        images, labels = file["images"], file["labels"]
    chosen = (np.arange(len(labels)) % _TEST_EVERY != 0) == train
    return TensorDataset(
        torch.from_numpy(images[chosen].astype(np.float32) / _BRIGHTEST).unsqueeze(1),
        torch.from_numpy(labels[chosen].astype(np.int64)),
    )


class DigitsSource(Source):
    """The embedded digits, or further images of the same shape.

    Args:
        train: whether to read the training part.
        file: an .npz file with `images` [N, 8, 8] from 0 to 16, and perhaps `labels`, instead of the embedded one.
    """

    kind = "digits"

    def __init__(self, train: bool, file: Path | None = None) -> None:
        self.description = "8x8 grey images of handwritten digits, 10 classes"
        self.data = digits(train) if file is None else _read(file)

    def __len__(self) -> int:
        return len(self.data)

    @property
    def models(self) -> tuple[str, ...]:
        return ("small-cnn",)

    def needs_counts(self) -> bool:
        return False

    def defaults(self, rows: int, epsilon: float, preset: str) -> Settings:
        common = {"model": "small-cnn", "batch_size": 512, "max_norm": 0.5}
        if epsilon == float("inf"):
            return Settings(**common, epochs=60, learning_rate=0.2)  # type: ignore[arg-type]
        if epsilon >= 5:
            return Settings(**common, epochs=60, learning_rate=0.4)  # type: ignore[arg-type]
        return Settings(**common, epochs=40, learning_rate=0.3)  # type: ignore[arg-type]

    def prepare(self, rows: np.ndarray, counts: object) -> DigitsEncoder:
        return DigitsEncoder()


class DigitsEncoder(Encoder):
    """Pixels from 0 to 1."""

    kind = "digits"
    task = Task(labels=tuple("0123456789"))
    preprocessing = ("pixels are divided by 16, the largest possible value; the ten classes are declared",)

    def encode(self, source: Source, rows: np.ndarray | None = None) -> TensorDataset:
        assert isinstance(source, DigitsSource)
        return source.data if rows is None else TensorDataset(*source.data[torch.from_numpy(rows)])

    def inputs(self, source: Source) -> tuple[Tensor, ...]:
        return self.encode(source).tensors[:1]

    def model(self, name: str) -> nn.Module:
        if name != "small-cnn":
            raise ConfigurationError(f"--model {name!r} is not known for the digits: use small-cnn.")
        return small_cnn()

    def synthetic(self, rows: int) -> TensorDataset:
        return TensorDataset(torch.rand(rows, 1, 8, 8), torch.arange(rows) % 10)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="none")

    def to_dict(self) -> dict[str, Any]:
        return {}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DigitsEncoder:
        return cls()

    def open(self, path: Path) -> DigitsSource:
        return DigitsSource(train=False, file=None if str(path) == EMBEDDED else path)


def _read(file: Path) -> TensorDataset:
    try:
        with np.load(file) as found:
            images, labels = found["images"], found.get("labels")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"{file} is not an .npz file with an array named images.") from error
    labels = np.zeros(len(images)) if labels is None else labels
    return TensorDataset(
        torch.from_numpy(images.astype(np.float32) / _BRIGHTEST).unsqueeze(1), torch.from_numpy(labels.astype(np.int64))
    )
