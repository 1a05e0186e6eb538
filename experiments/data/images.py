"""Sets of images by name, as tensors."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from clipwise.errors import ConfigurationError
from clipwise.recipes.digits import digits
from clipwise.validation.arguments import one_of
from experiments.data.cifar10 import read_cifar10
from experiments.data.folder import folder_of, require_file
from experiments.data.idx import read_idx

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Look:
    """Public constants of a set of images.

    Attributes:
        channels: 1 for grey, 3 for colour.
        side: height and width.
        mean, deviation: constants per channel that pixels are standardised with: the usual ones of the public set,
            not computed from the records.
    """

    channels: int
    side: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def standardised(self, x_BCHW: Tensor) -> Tensor:
        """(x - mean) / deviation, channel by channel."""
        shape = (1, -1, 1, 1)
        return (x_BCHW - x_BCHW.new_tensor(self.mean).view(shape)) / x_BCHW.new_tensor(self.deviation).view(shape)


LOOKS = {
    "digits": Look(1, 8, (0.5,), (0.5,)),
    "mnist": Look(1, 28, (0.1307,), (0.3081,)),
    "fashion_mnist": Look(1, 28, (0.2860,), (0.3530,)),
    "kmnist": Look(1, 28, (0.1307,), (0.3081,)),  # those of MNIST, for which it stands in
    "cifar10": Look(3, 32, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
}


def look(name: str) -> Look:
    """The public constants of a data set."""
    one_of("data", name, LOOKS)
    return LOOKS[name]


def images(name: str, train: bool, folder: str | os.PathLike[str] | None = None) -> TensorDataset:
    """A set of images, unchanged and in its original order.

    Args:
        name: "digits", which ships with clipwise, or "mnist", "fashion_mnist", "kmnist" (its test part only) or
            "cifar10" of a folder.
        train: the training part or the test part.
        folder: of the data sets; by default that of the environment variable CLIPWISE_DATA.

    Returns:
        Images, float32 [N, C, H, W] from 0 to 1, and labels, int64 [N].
    """
    look(name)
    if name == "digits":
        return digits(train)
    pixels, labels = _READERS[name](folder_of(folder), train)
    return TensorDataset(
        torch.from_numpy(pixels.astype(np.float32)).div_(255), torch.from_numpy(labels.astype(np.int64))
    )


def _idx_set(name: str) -> Callable[[Path, bool], tuple[Bytes, Bytes]]:
    def read(folder: Path, train: bool) -> tuple[Bytes, Bytes]:
        part = "train" if train else "t10k"
        pixels, labels = (
            read_idx(require_file(folder / name / f"{part}-{kind}-ubyte.gz", name))
            for kind in ("images-idx3", "labels-idx1")
        )
        return pixels[:, None], labels

    return read


def _kmnist(folder: Path, train: bool) -> tuple[Bytes, Bytes]:
    if train:
        raise ConfigurationError("data='kmnist' has its test part only: give train=False.")
    arrays = []
    for kind in ("imgs", "labels"):
        with np.load(require_file(folder / "kmnist" / f"kmnist-test-{kind}.npz", "kmnist")) as file:
            arrays.append(file["arr_0"])
    return arrays[0][:, None], arrays[1]


_READERS: dict[str, Callable[[Path, bool], tuple[Bytes, Bytes]]] = {
    "mnist": _idx_set("mnist"),
    "fashion_mnist": _idx_set("fashion_mnist"),
    "kmnist": _kmnist,
    "cifar10": read_cifar10,
}
