"""Digests of a configuration, a data set and a model, to decide whether two runs are the same.

A digest of the data is a function of private data and would allow anyone to test a guess of it. It is therefore never
published: only the resume file holds it.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

_SAMPLED_ITEMS = 16  # of a data set that is not a TensorDataset


def of_configuration(configuration: Mapping[str, Any]) -> str:
    """A digest of a configuration in plain types."""
    text = json.dumps(configuration, sort_keys=True, default=repr)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def of_parameters(parameters: Mapping[str, nn.Parameter]) -> str:
    """A digest of the names and shapes of the parameters."""
    return of_configuration({name: list(p.shape) for name, p in parameters.items()})


def of_data(dataset: Any) -> bytes:
    """A digest of a data set: all of a TensorDataset, some items of any other."""
    digest = blake2b(digest_size=32)
    digest.update(f"{type(dataset).__qualname__}:{len(dataset)}".encode())
    if isinstance(dataset, TensorDataset):
        for tensor in dataset.tensors:
            _update(digest, tensor)
    elif type(dataset) is Subset:
        _update(digest, list(dataset.indices))
        digest.update(of_data(dataset.dataset))
    else:
        for i in np.unique(np.linspace(0, len(dataset) - 1, _SAMPLED_ITEMS).astype(int)).tolist():
            _update(digest, dataset[i])
    return digest.digest()


def of_users(records: Sequence[Sequence[int]]) -> bytes:
    """A digest of the records of each user."""
    digest = blake2b(digest_size=32)
    _update(digest, records)
    return digest.digest()


def of_model(model: nn.Module, state: Mapping[str, Any] | None = None) -> bytes:
    """A digest of a model: its `repr` and its `state_dict`, or `state` if the model is sharded.

    `fully_shard` puts FSDP before the names of classes.
    """
    digest = blake2b(digest_size=32)
    digest.update(re.sub(r" at 0x[0-9a-f]+|\bFSDP(?=[A-Z])", "", repr(model)).encode())
    _update(digest, model.state_dict() if state is None else state)
    return digest.digest()


def _update(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        _update(digest, list(value.items()))
    elif isinstance(value, (list, tuple)):
        digest.update(f"{len(value)}:".encode())
        for item in value:
            _update(digest, item)
    elif isinstance(value, (bool, int, float, str, bytes, type(None))):
        digest.update(f"{type(value).__name__}:{value!r}".encode())
    else:  # not its repr, which may hold its address
        digest.update(f"{type(value).__qualname__}:".encode())
        with suppress(Exception):  # a value that cannot be pickled counts by its type alone
            digest.update(pickle.dumps(value, protocol=4))
