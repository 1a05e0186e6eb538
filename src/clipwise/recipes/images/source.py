"""Images as a source of `clipwise train`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from clipwise.errors import ConfigurationError
from clipwise.recipes.class_labels import require_labels
from clipwise.recipes.images.defaults import MODELS, SCATTERING, TANH_CNN, WIDE_RESNET, image_settings
from clipwise.recipes.images.encoder import ImageEncoder
from clipwise.recipes.images.formats import is_images, open_images
from clipwise.recipes.kind import ASSUMED_LABELS, Settings
from clipwise.recipes.labelled import LabelledSource
from clipwise.validation.arguments import whole

if TYPE_CHECKING:
    from clipwise.recipes.counts import NoisedCounts

FOLDER_SIZE = 32  # of image files, which state no common size
LARGEST_SIZE = 64  # of arrays, if no size is declared


class ImageSource(LabelledSource):
    """A folder with one sub-folder for each class, idx files, an .npz file, or CIFAR's binary version.

    Args:
        path: of the images.
        labels: the classes, if they are declared. Not needed if the layout states them, as sub-folders do.
        image_size: the side of the square images that the model takes. By default that of the arrays, at most 64, or
            32 for image files, so that it is not computed from private images.
        grey: whether to drop colours. By default image files are read in colour, and arrays as they are.
        model: "scattering", "tanh-cnn" or "wrn-16-4", if the user chose one.
        part: "train" or "test", where the layout has both.
    """

    kind: ClassVar[str] = "images"
    augmented_models: ClassVar[tuple[str, ...]] = (TANH_CNN, WIDE_RESNET)

    def __init__(
        self,
        path: Path | str,
        *,
        labels: Sequence[str] | None = None,
        image_size: int | None = None,
        grey: bool | None = None,
        model: str | None = None,
        part: str = "train",
    ) -> None:
        self._model = model
        self.images = self.records = open_images(Path(path), part)
        if len(self.images) == 0:
            raise ConfigurationError(f"{path}: there are no images in it.")
        self.declared = None if labels is None else require_labels(labels)
        size = image_size if image_size is not None else min(self.images.side or FOLDER_SIZE, LARGEST_SIZE)
        self.image_size = whole("image_size", size, least=1, most=1024)
        self.channels = (self.images.channels or 3) if grey is None else (1 if grey else 3)
        self.description = self.images.description
        self._size_is_declared = image_size is not None

    @staticmethod
    def recognises(path: Path) -> bool:
        """Whether the path looks like images rather than a table or texts."""
        return is_images(path)

    @property
    def models(self) -> tuple[str, ...]:
        return MODELS

    def defaults(self, rows: int, epsilon: float, preset: str) -> Settings:
        return image_settings(rows, epsilon, preset, self.channels, self._model)

    def prepare(self, rows: np.ndarray, counts: NoisedCounts | None) -> ImageEncoder:
        how_to = "Put them into one sub-folder for each class, or the file of labels beside the file of images."
        labels, about_labels = self.labels_of(rows, counts, how_to)
        lines = (about_labels, self._size_line())
        return ImageEncoder(labels, self.channels, self.image_size, lines, self._model or SCATTERING)

    def largest(self, rows: int, counts: NoisedCounts) -> ImageEncoder:
        return ImageEncoder(ASSUMED_LABELS, self.channels, self.image_size)

    def require_readable(self, rows: np.ndarray) -> None:
        for row in np.asarray(rows):  # one at a time: their pixels are not kept
            self.images.pixels(np.array([row]), self.channels, self.image_size)

    def _size_line(self) -> str:
        colours = "grey" if self.channels == 1 else "colour"
        how = "declared" if self._size_is_declared else "fixed by the format"
        return (
            f"Images are {colours}, {self.image_size} x {self.image_size} pixels ({how}), with values from -0.5 to "
            "0.5. No statistics of the images are used."
        )
