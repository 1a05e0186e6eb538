"""The data of a run, on its device, in the model's input format."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from experiments import data

PUBLIC_ROWS = 128
MADE_UP = "made-up texts"  # for a quick run, which needs no data sets
# The data set that provides the public rows of a private data set.
_PUBLIC_OF = {"mnist": "kmnist", "ag_news": "imdb"}
_WORDS = 40  # of a text


class Sets(NamedTuple):
    """Parts that share no record.

    Attributes:
        train: the training part.
        validation: for choosing settings, and for the accuracy after each epoch; empty where it is trained on.
        held_out: the evaluation part: the test part, or the validation part while settings are chosen.
        public: the labelled tenth that counts as public, for sets without other public data; empty otherwise.
    """

    train: TensorDataset
    validation: TensorDataset
    held_out: TensorDataset
    public: TensorDataset


def load(
    name: str, side: int, folder: Path | None, device: torch.device, *, judged_by: str, trains_on_all: bool
) -> Sets:
    """A data set split into parts.

    Args:
        name: of the data set.
        side: the size to which images are cropped, padded or (digits) enlarged.
        folder: of the data sets.
        device: of the tensors.
        judged_by: "test", or "validation" while the test part must not be read.
        trains_on_all: whether the final run is trained on the validation part too.
    """
    parts = data.split(_read(name, True, side, folder), validation=True)
    train, public = parts.private, parts.public
    if name in _PUBLIC_OF:
        train, public = _joined(train, public), _none_of(public)
    validation = parts.validation
    held_out = validation if judged_by == "validation" else _read(name, False, side, folder)
    if trains_on_all and judged_by == "test":
        train, validation = _joined(train, validation), _none_of(validation)
    return Sets(*(data.placed(part, device) for part in (train, validation, held_out, public)))


def public_rows(name: str, side: int, folder: Path | None, device: torch.device) -> Tensor:
    """128 rows, without labels: of another data set if there is one, else of the public tenth."""
    if name in _PUBLIC_OF:
        # Only the test part of KMNIST is available; nothing is tested on it.
        other = _read(_PUBLIC_OF[name], False, side, folder)
    else:
        other = data.split(_read(name, True, side, folder)).public
    return other.tensors[0][:PUBLIC_ROWS].to(device)


def _read(name: str, train: bool, side: int, folder: Path | None) -> TensorDataset:
    if name == MADE_UP:
        return _made_up(train)
    if side == 0:
        return data.texts(name, train, folder, length=_WORDS)
    x, y = data.images(name, train, folder).tensors
    if name == "digits":
        x = F.interpolate(x, size=side)
    margin = side - x.shape[-1]  # negative: the centre is cropped
    return TensorDataset(data.look(name).standardised(F.pad(x, [margin // 2] * 4)), y)


def _made_up(train: bool) -> TensorDataset:
    """Synthetic texts of 12 words, some of which indicate the class. Accuracies on them mean nothing."""
    random = torch.Generator().manual_seed(int(train))
    y = torch.randint(4, (600 if train else 200,), generator=random)
    ids = torch.randint(50, 2000, (len(y), 12), generator=random)
    ids[:, :4] = 1 + y[:, None] * 10 + ids[:, :4] % 10
    ids[::3, 8:] = 0
    return TensorDataset(ids, y)


def _joined(*parts: TensorDataset) -> TensorDataset:
    return TensorDataset(*(torch.cat(tensors) for tensors in zip(*(p.tensors for p in parts), strict=True)))


def _none_of(part: TensorDataset) -> TensorDataset:
    return TensorDataset(*(tensor[:0] for tensor in part.tensors))
