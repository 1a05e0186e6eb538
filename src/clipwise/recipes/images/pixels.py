"""Images that are opened lazily: their number, shape and layout are known, and their pixels are read on demand.

B: images, C: channels, H, W: height and width, S: side of the square images that a model takes.
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from clipwise.errors import ConfigurationError
from clipwise.recipes.labelled import ClassFolders, Records

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue in a grey value


class Images(Records):
    """Images of a folder or file.

    Attributes:
        side: the greater of height and width if the format states it, which makes it public; else None.
        channels: 1 or 3 if the format states it; else None.
    """

    side: int | None = None
    channels: int | None = None

    @abstractmethod
    def pixels(self, rows: NDArray[np.int64], channels: int, side: int) -> Tensor:
        """Pixels from 0 to 1, float32 [B, channels, side, side]."""


class ArrayImages(Images):
    """Images in one array, [N, H, W] or [N, H, W, C] or [N, C, H, W], of bytes or of numbers from 0 to 1."""

    def __init__(
        self,
        description: str,
        array: NDArray[Any],
        labels: NDArray[Any] | None,
        names: tuple[str, ...] | None = None,
        *,
        byte_labels: bool = False,
    ) -> None:
        self.description, self.names, self.byte_labels = description, names, byte_labels
        self._x_NCHW = _channels_first(array, description)
        if labels is not None and labels.shape != (len(array),):
            raise ConfigurationError(f"{description}: it has {len(array)} images, but labels of shape {labels.shape}.")
        self._labels = labels
        self.channels, self.side = (3 if self._x_NCHW.shape[1] >= 3 else 1), max(self._x_NCHW.shape[2:])

    def __len__(self) -> int:
        return len(self._x_NCHW)

    def labels(self) -> list[str | None] | None:
        if self._labels is None:
            return None
        if self.names is not None:
            return [self.names[label] if 0 <= label < len(self.names) else None for label in self._labels.tolist()]
        return [str(label) for label in self._labels.tolist()]

    def pixels(self, rows: NDArray[np.int64], channels: int, side: int) -> Tensor:
        x_BCHW = _unit_range(self._x_NCHW[rows])[:, :3]  # without an alpha channel
        if x_BCHW.shape[1] == 2:  # grey and alpha
            x_BCHW = x_BCHW[:, :1]
        if x_BCHW.shape[1] == 3 and channels == 1:
            x_BCHW = (x_BCHW * x_BCHW.new_tensor(_LUMA).view(1, 3, 1, 1)).sum(1, keepdim=True)
        x_BCHW = x_BCHW.expand(-1, channels, -1, -1)
        if x_BCHW.shape[2:] != (side, side) and len(x_BCHW):
            x_BCHW = F.interpolate(x_BCHW, (side, side), mode="bilinear", antialias=True)
        return x_BCHW.contiguous()


class FolderImages(ClassFolders, Images):
    """Image files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "image", SUFFIXES)
        if not self._files:
            raise ConfigurationError(
                f"{folder}: there are no images in it. Give a folder with one sub-folder of PNG or JPEG files for "
                "each class, idx files, an .npz file, or CIFAR's binary version."
            )

    def pixels(self, rows: NDArray[np.int64], channels: int, side: int) -> Tensor:
        images = [self._read(self._files[row][1], channels, side) for row in rows.tolist()]
        x_BHWC = np.stack(images) if images else np.zeros((0, side, side, channels), np.uint8)
        return torch.from_numpy(x_BHWC).permute(0, 3, 1, 2).contiguous().float() / 255

    def _read(self, file: Path, channels: int, side: int) -> NDArray[np.uint8]:
        """One image, stretched to a square: uint8 [side, side, channels]."""
        try:
            from PIL import Image, ImageOps
        except ImportError as error:
            raise ConfigurationError(
                "Image files are read with Pillow, which is not installed: pip install 'clipwise-dp[images]'."
            ) from error
        try:
            with Image.open(file) as opened:
                image: Any = ImageOps.exif_transpose(opened)
                if image.mode.startswith("I"):  # 16 bits for a pixel
                    image = Image.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
                image = image.convert("L" if channels == 1 else "RGB").resize((side, side), Image.Resampling.BILINEAR)
        except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
            raise ConfigurationError(
                f"{file.relative_to(self._folder)} cannot be read as an image: repair it, or take it out of the folder."
            ) from error
        return np.asarray(image, np.uint8).reshape(side, side, channels)


def _channels_first(array: NDArray[Any], description: str) -> NDArray[Any]:
    if array.dtype.kind not in "uibf":
        raise ConfigurationError(f"{description}: the images have the type {array.dtype}: store bytes from 0 to 255.")
    found: NDArray[Any] | None = None
    if array.ndim == 3:
        found = np.expand_dims(array, 1)
    elif array.ndim == 4 and array.shape[3] in (1, 2, 3, 4):
        found = array.transpose(0, 3, 1, 2)
    elif array.ndim == 4 and array.shape[1] in (1, 2, 3, 4):
        found = array
    if found is None or 0 in found.shape[2:]:
        raise ConfigurationError(
            f"{description}: an array of shape {array.shape} is not a set of images: it needs the axes N, height and "
            "width, and 1 to 4 channels as the last axis or the second."
        )
    return found


def _unit_range(x: NDArray[Any]) -> Tensor:
    """From 0 to 1 by the type alone: whole numbers are bytes, fractions are taken as they are. Others are clamped."""
    if x.dtype.kind in "ui":
        most = 65535 if x.dtype == np.uint16 else 255
        return torch.from_numpy(x.astype(np.float32)).div_(most).clamp_(0, 1)
    return torch.from_numpy(x.astype(np.float32)).nan_to_num_(0.0).clamp_(0, 1)
