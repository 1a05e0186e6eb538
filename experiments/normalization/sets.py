"""The data of a run, on its device, in the form that the model takes."""

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
# Whose public rows stand beside a private set that gives up none of its own.
_PUBLIC_OF = {"mnist": "kmnist", "ag_news": "imdb"}
_WORDS = 40  # of a text


class Sets(NamedTuple):
    """Parts that share no record.

    Attributes:
        train: what is trained on.
        validation: for choosing settings, and for the accuracy after each epoch; empty where it is trained on.
        held_out: what a run is judged by: the test part, or the validation part while settings are chosen.
        public: the labelled tenth that counts as public, of sets that have no other public data; empty otherwise.
    """

    train: TensorDataset
    validation: TensorDataset
    held_out: TensorDataset
    public: TensorDataset


def load(
    name: str, side: int, folder: Path | None, device: torch.device, *, judged_by: str, trains_on_all: bool
) -> Sets:
    """A data set cut into parts.

    Args:
        name: of the data set.
        side: what images are cut, filled up or (digits) enlarged to.
        folder: of the data sets.
        device: where the tensors go, once.
        judged_by: "test", or "validation" where the test part may not be read.
        trains_on_all: whether the final run, judged by the test part, is trained on the validation part too.
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
        # Of KMNIST only the test part is at hand: nothing is tested on it here.
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
    margin = side - x.shape[-1]  # negative: the middle is cut out
    return TensorDataset(data.look(name).standardised(F.pad(x, [margin // 2] * 4)), y)


def _made_up(train: bool) -> TensorDataset:
    """Texts of 12 words of which some tell the class: nothing can be learned from how well they are read."""
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
