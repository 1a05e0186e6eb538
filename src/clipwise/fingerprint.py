"""Whether two runs are the same: short digests of a configuration and of a data set.

A digest of the data is itself a function of private data, and would let anyone test a guess of it. It is
therefore never published: it goes into the derivation of a key, or into the resume file, and nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

_SAMPLED_ITEMS = 16  # of a data set that is not a TensorDataset


def of_configuration(configuration: Mapping[str, Any]) -> str:
    """A digest of a configuration in plain types."""
    text = json.dumps(configuration, sort_keys=True, default=repr)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def of_data(dataset: Any) -> bytes:
    """A digest of a data set: all of a TensorDataset, some items of any other."""
    digest = blake2b(digest_size=32)
    digest.update(f"{type(dataset).__qualname__}:{len(dataset)}".encode())
    if isinstance(dataset, TensorDataset):
        for tensor in dataset.tensors:
            _update(digest, tensor)
    else:
        for i in np.unique(np.linspace(0, len(dataset) - 1, _SAMPLED_ITEMS).astype(int)).tolist():
            _update(digest, dataset[i])
    return digest.digest()


def of_values(values: Any) -> bytes:
    """A digest of tensors and plain values, nested as they are."""
    digest = blake2b(digest_size=32)
    _update(digest, values)
    return digest.digest()


def _update(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        for key in value:
            _update(digest, key)
            _update(digest, value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            _update(digest, item)
    else:
        digest.update(f"{type(value).__name__}:{value!r}".encode())
