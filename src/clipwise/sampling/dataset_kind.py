"""Raises for a `dataset` that is not a map-style data set, with what to pass instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from clipwise.errors import ConfigurationError

_MOST_COLUMNS = 4  # no training set has so few records, and few have more columns
_FROM_TABLE = (
    "TensorDataset(torch.tensor(table[features].to_numpy(), dtype=torch.float32), "
    "torch.tensor(table[label].to_numpy()))"
)


def length_of(dataset: Any) -> int:
    """The number of records of a map-style data set. Raises for anything else."""
    kind = type(dataset).__name__
    hint = _what_to_pass(dataset)
    if hint is not None:
        raise ConfigurationError(f"dataset is a {kind}{hint}")
    if hasattr(dataset, "__getitem__"):
        try:
            return len(dataset)
        except (TypeError, NotImplementedError):
            pass
    raise ConfigurationError(
        f"dataset is a {kind}, which has no length or cannot be indexed: a private batch is drawn by index from a "
        "known number of records. Pass a map-style data set, with __len__ and __getitem__; for a generator, a list of "
        "its records."
    )


def _what_to_pass(dataset: Any) -> str | None:
    """The rest of the message, for a known kind that is not a data set of records. None for all others."""
    if isinstance(dataset, DataLoader):
        own_collate = dataset.collate_fn is not default_collate and dataset.batch_size is not None
        batch_size = "..." if dataset.batch_size is None else dataset.batch_size
        collate = ", collate_fn=loader.collate_fn" if own_collate else ""
        return (
            ", and its batches are not drawn as the privacy accounting assumes. Pass the data set behind it: "
            f"make_private(model, optimizer, loader.dataset, batch_size={batch_size}{collate}, ...), and loop over "
            "private.loader. Its sampler and drop_last are not used."
        )
    if isinstance(dataset, IterableDataset):
        return (
            ", an IterableDataset: it has no index to draw a private batch by. Pass a map-style data set, with __len__ "
            "and __getitem__, or a list of its records."
        )
    if _is_table(dataset):
        return f", indexed by the names of its columns or rows, not by the number of a record. Pass {_FROM_TABLE}."
    if isinstance(dataset, Mapping) and 0 not in dataset:
        return (
            " of columns or splits by name, not of records by number. Pass one split, such as dataset['train'], or "
            "TensorDataset(columns['x'], columns['y'])."
        )
    if isinstance(dataset, (list, tuple)) and _are_columns(dataset):
        return (
            f" of {len(dataset)} entries that look like columns: each has a length of its own. Pass "
            "TensorDataset(x, y), with torch.as_tensor for arrays; its records are (x[i], y[i])."
        )
    return None


def _is_table(dataset: Any) -> bool:
    """A DataFrame or Series of pandas, a DataFrame of polars, a Table of pyarrow. None of them is imported."""
    if isinstance(dataset, Dataset):
        return False
    return hasattr(dataset, "iloc") or (hasattr(dataset, "columns") and hasattr(dataset, "shape"))


def _are_columns(entries: list[Any] | tuple[Any, ...]) -> bool:
    """Whether entries look like columns `(x, y)`: a few tensors or arrays of one length, larger than their number."""
    if not 0 < len(entries) <= _MOST_COLUMNS:
        return False
    if not all((isinstance(e, (torch.Tensor, np.ndarray)) and e.ndim > 0) or _is_table(e) for e in entries):
        return False
    lengths = {len(entry) for entry in entries}
    return len(lengths) == 1 and lengths.pop() > len(entries)
