"""Which records are private, public, or for choosing settings."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import TensorDataset

PARTS = 10
_PUBLIC, _VALIDATION = 0, 1
_KEY = 20_231  # public and constant


class Split(NamedTuple):
    """Parts of a training set that share no record."""

    private: TensorDataset
    public: TensorDataset
    validation: TensorDataset


def split(dataset: TensorDataset, *, validation: bool = False) -> Split:
    """A random tenth is declared public; with `validation`, another tenth is kept for choosing settings.

    The split depends only on positions, so it costs no privacy. Positions are drawn from a fixed key, because files are
    not always in random order (MNIST's even and odd records come from different writers). The public tenth stands for
    public data; real private data has no public tenth.

    Args:
        dataset: the training set.
        validation: whether to keep the validation tenth apart. Without it, it is empty and its records are private.
    """
    # numpy guarantees the output of a bit generator, so this order is the same everywhere.
    order = np.argsort(np.random.Philox(key=_KEY).random_raw(len(dataset)), kind="stable")
    place = torch.empty(len(dataset), dtype=torch.long)
    place[torch.from_numpy(order)] = torch.arange(len(dataset)) % PARTS
    is_public = place == _PUBLIC
    is_validation = (place == _VALIDATION) & validation
    return Split(*(_rows(dataset, which) for which in (~is_public & ~is_validation, is_public, is_validation)))


def _rows(dataset: TensorDataset, chosen: torch.Tensor) -> TensorDataset:
    return TensorDataset(*(tensor[chosen] for tensor in dataset.tensors))


def placed(dataset: TensorDataset, device: torch.device | str) -> TensorDataset:
    """The data set on a device."""
    return TensorDataset(*(tensor.to(device) for tensor in dataset.tensors))
