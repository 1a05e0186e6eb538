"""The fixed encoding of images: pixels in a public range, or scattering features of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise.errors import ConfigurationError
from clipwise.recipes.images.defaults import MODELS, SCATTERING, TANH_CNN
from clipwise.recipes.images.networks import tanh_cnn, wide_resnet
from clipwise.recipes.images.scattering import scattering, scattering_size
from clipwise.recipes.kind import Source
from clipwise.recipes.labelled import LabelledEncoder
from clipwise.recipes.linear import LinearOnFeatures
from clipwise.sampling.augmentation import Crop, Flip, Views
from clipwise.validation.arguments import one_of

if TYPE_CHECKING:
    from clipwise.recipes.images.source import ImageSource

_CHUNK = 1024  # images at a time


@dataclass(frozen=True)
class ImageEncoder(LabelledEncoder):
    """How an image becomes the input of a model.

    Args:
        labels: the classes.
        channels: 1 for grey, 3 for colour.
        image_size: the side of the square images.
        preprocessing: lines for the statement.
        model_name: the model that the encoding is for. "scattering" takes features, the others take pixels.
    """

    labels: tuple[str, ...]
    channels: int
    image_size: int
    preprocessing: tuple[str, ...] = ()
    model_name: str = SCATTERING
    kind: ClassVar[str] = "images"
    models: ClassVar[tuple[str, ...]] = MODELS

    def encode(self, source: Source, rows: np.ndarray | None = None) -> TensorDataset:
        images = self._images(source)
        rows = np.arange(len(source)) if rows is None else np.asarray(rows)
        found = images.images.targets(rows, self.labels)
        return TensorDataset(self._inputs(images, rows), found)

    def inputs(self, source: Source) -> tuple[Tensor, ...]:
        return (self._inputs(self._images(source), np.arange(len(source))),)

    def _images(self, source: Source) -> ImageSource:
        from clipwise.recipes.images.source import ImageSource

        if not isinstance(source, ImageSource):
            raise ConfigurationError(f"This model takes images, and the data are of the kind {source.kind!r}.")
        return source

    def _inputs(self, source: ImageSource, rows: np.ndarray) -> Tensor:
        pieces = [rows[start : start + _CHUNK] for start in range(0, max(len(rows), 1), _CHUNK)]
        return torch.cat([self._encoded(source.images.pixels(p, self.channels, self.image_size)) for p in pieces])

    def _encoded(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = x_BCHW - 0.5
        return scattering(x_BCHW) if self.model_name == SCATTERING else x_BCHW

    def model(self, name: str) -> nn.Module:
        one_of("model", name, MODELS)
        if (name == SCATTERING) != (self.model_name == SCATTERING):
            raise ConfigurationError(
                f"model={name!r}: this encoding is for {self.model_name!r}: use for_model({name!r})."
            )
        if name == SCATTERING:
            return LinearOnFeatures(scattering_size(self.channels, self.image_size), len(self.labels))
        if name == TANH_CNN:
            return tanh_cnn(self.channels, self.image_size, len(self.labels))
        return wide_resnet(self.channels, len(self.labels))

    def synthetic(self, rows: int) -> TensorDataset:
        x_BCHW = torch.rand(min(rows, _CHUNK), self.channels, self.image_size, self.image_size)
        x = self._encoded(x_BCHW)[torch.arange(rows) % _CHUNK]
        return TensorDataset(x, torch.arange(rows) % len(self.labels))

    def views(self, count: int) -> Views | None:
        """Random crops, and for colour images flips. Features cannot be cropped."""
        if self.model_name == SCATTERING or count <= 1:
            return None
        crop = Crop(self.image_size, padding=max(1, self.image_size // 8))
        return Views(count, crop, Flip()) if self.channels == 3 else Views(count, crop)

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        return found | {"kind": self.kind, "labels": list(self.labels), "preprocessing": list(self.preprocessing)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ImageEncoder:
        return cls(
            tuple(data["labels"]),
            int(data["channels"]),
            int(data["image_size"]),
            tuple(data["preprocessing"]),
            str(data["model_name"]),
        )

    def open(self, path: Path) -> Source:
        """Further images. Of a layout with a training and a test part this is the test part."""
        from clipwise.recipes.images.source import ImageSource

        return ImageSource(path, labels=self.labels, image_size=self.image_size, grey=self.channels == 1, part="test")
