"""The records of a trial: training part, evaluation part, and public constants."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.utils.data import TensorDataset

from clipwise.validation.arguments import one_of
from experiments import data

VALIDATION_SHARE = 0.2
IMAGE_DELTA = 1e-5
# The value subtracted from pixels in [0, 1], the norm that images are then clipped to, and the network. All fixed.
IMAGES = {
    "mnist": (0.0, 9.0, "convnet3"),
    "fashion_mnist": (0.0, 12.0, "patch_convnet6"),
    "cifar10": (0.5, 14.0, "patch_vgg"),
}
DIGITS = "digits"  # ships with clipwise: a table of 64 numbers
Folder = str | os.PathLike[str] | None


@dataclass(frozen=True)
class Records:
    """Parts of one data set, on a device.

    Attributes:
        train: features or images, and labels.
        held_out: the test part or, while settings are chosen, a validation part.
        model: the name of the network for these records.
        classes: the number of classes.
        input_norm: the norm that inputs are clipped to.
        delta: 1 / n for tables of n records, 1e-5 for images.
        note: a remark for readers of results, or empty.
    """

    train: TensorDataset
    held_out: TensorDataset
    model: str
    classes: int
    input_norm: float
    delta: float
    note: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return tuple(self.train.tensors[0].shape[1:])


def names() -> list[str]:
    """Every data set that has a network here."""
    return [*data.tables.names(), *IMAGES, DIGITS]


def records(name: str, folder: Folder, device: torch.device, *, judged_by: str = "validation", cut: int = 0) -> Records:
    """A data set with its test part, or with a validation part that is a fifth of the training records.

    Args:
        name: one of `names()`.
        folder: of data sets, or None for the one that CLIPWISE_DATA names.
        device: the device of the records.
        judged_by: "validation", without the test part, or "test".
        cut: which of several validation parts; each is drawn by position, from a fixed key.
    """
    whole = _whole(name, None if folder is None else os.fspath(folder), str(device))
    if judged_by == "test":
        return whole
    rest, validation = data.cut(whole.train, VALIDATION_SHARE, seed=1000 + cut)
    return Records(rest, validation, whole.model, whole.classes, whole.input_norm, whole.delta, whole.note)


@lru_cache(maxsize=4)
def _whole(name: str, folder: str | None, device: str) -> Records:
    if name in IMAGES:
        centre, input_norm, model = IMAGES[name]
        train, test = (data.placed(_centred(data.images(name, t, folder), centre), device) for t in (True, False))
        return Records(train, test, model, 10, input_norm, IMAGE_DELTA)
    if name == DIGITS:
        train, test = (data.placed(_flat(data.digits(t)), device) for t in (True, False))
        return Records(train, test, "mlp2", 10, 4.0, IMAGE_DELTA)
    one_of("data", name, names())
    table = data.table(name, folder)
    count = len(table.train) + len(table.test)
    train, test = (data.placed(part, device) for part in (table.train, table.test))
    return Records(train, test, "mlp2", len(table.classes), table.input_norm, 1 / count, table.note)


def _flat(images: TensorDataset) -> TensorDataset:
    x, y = images.tensors
    return TensorDataset(x.flatten(1), y)


def _centred(images: TensorDataset, centre: float) -> TensorDataset:
    x, y = images.tensors
    return TensorDataset(x - centre, y)
