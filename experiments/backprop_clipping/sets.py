"""The training and evaluation images of a trial, on a device."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from experiments import data

VALIDATION_SHARE, _CUT = 0.2, 4004
DIGITS = "digits"  # ships with clipwise
SIDE, _FEW = 28, 600  # few digits, for a quick check
Folder = str | os.PathLike[str] | None


@dataclass(frozen=True)
class Images:
    """Parts of one data set: `held_out` is the test part or, while settings are chosen, a validation part."""

    name: str
    train: TensorDataset
    held_out: TensorDataset


def images(name: str, folder: Folder, device: torch.device, judged_by: str) -> Images:
    """Standardised images. The validation part is a fifth of the training records, without the test part."""
    return _images(name, None if folder is None else os.fspath(folder), str(device), judged_by)


@lru_cache(maxsize=3)
def _images(name: str, folder: str | None, device: str, judged_by: str) -> Images:
    train = _ready(name, True, folder, device)
    if judged_by == "test":
        return Images(name, train, _ready(name, False, folder, device))
    return Images(name, *data.cut(train, VALIDATION_SHARE, seed=_CUT))


def _ready(name: str, train: bool, folder: str | None, device: str) -> TensorDataset:
    x, y = data.images(name, train, folder).tensors
    x = data.look(name).standardised(x)  # by public constants
    if name == DIGITS:
        x, y = F.interpolate(x[:_FEW], size=(SIDE, SIDE)), y[:_FEW]
    return TensorDataset(x.to(device), y.to(device))
