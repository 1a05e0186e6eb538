"""Tiny files of images for tests."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np


def random_pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def write_png(path: Path, pixels: np.ndarray) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(folder: Path, rows: int, *, zipped: bool = True, side: int = 8, part: str = "train") -> np.ndarray:
    """A pair of idx files as MNIST has them. The label of image i is i mod 2."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels = random_pixels(rows, side, side)
    labels = (np.arange(rows) % 2).astype(np.uint8)
    for name, array in (("images-idx3", pixels), ("labels-idx1", labels)):
        content = idx(array)
        end = ".gz" if zipped else ""
        (folder / f"{part}-{name}-ubyte{end}").write_bytes(gzip.compress(content) if zipped else content)
    return pixels


def write_cifar10(folder: Path, rows: int = 3) -> np.ndarray:
    """Five batches for training and one for testing; returns the pixels of the first batch."""
    folder.mkdir()
    pixels = random_pixels(rows, 3 * 32 * 32)
    labels = (np.arange(rows) % 10).astype(np.uint8)[:, None]
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (folder / f"{name}.bin").write_bytes(np.hstack([labels, pixels]).tobytes())
    return pixels
