"""CIFAR-10 from the binary batches of its publisher, or from lossless mosaics of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clipwise.errors import ConfigurationError
from experiments.data.folder import require_file

SIDE = 32
_RECORD = 1 + 3 * SIDE * SIDE  # a label, then red, green and blue, row by row
Bytes = NDArray[np.uint8]


def read_cifar10(folder: Path, train: bool) -> tuple[Bytes, Bytes]:
    """Images [N, 3, 32, 32] and labels [N].

    From `cifar-10-batches-bin/*.bin`, the publisher's binary version; or from `cifar10/*.webp`, each batch a
    lossless mosaic of 100 x 100 images, row by row, with `cifar10/labels.npz`, which needs Pillow.
    """
    names = [f"data_batch_{i}" for i in range(1, 6)] if train else ["test_batch"]
    if (folder / "cifar-10-batches-bin").is_dir():
        files = [require_file(folder / "cifar-10-batches-bin" / f"{name}.bin", "cifar10") for name in names]
        records = np.concatenate([np.fromfile(file, np.uint8).reshape(-1, _RECORD) for file in files])
        return records[:, 1:].reshape(-1, 3, SIDE, SIDE), records[:, 0]
    files = [require_file(folder / "cifar10" / f"{name}.webp", "cifar10") for name in names]
    with np.load(require_file(folder / "cifar10" / "labels.npz", "cifar10")) as labels:
        return np.concatenate([_mosaic(file) for file in files]), labels["y_train" if train else "y_test"]


def _mosaic(file: Path) -> Bytes:
    """The tiles of an image, channels first."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigurationError(
            f"{file.name} is read with Pillow, which is not installed: install it, or put the publisher's "
            "cifar-10-batches-bin/*.bin into the folder of data sets."
        ) from error
    with Image.open(file) as image:
        pixels: Bytes = np.asarray(image.convert("RGB"))
    rows, columns = pixels.shape[0] // SIDE, pixels.shape[1] // SIDE
    tiles = pixels.reshape(rows, SIDE, columns, SIDE, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(tiles).reshape(rows * columns, 3, SIDE, SIDE)
