"""Fetches the records of indices and collates them to a batch; raises for a `dataset` that is not map-style."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from clipwise.errors import ConfigurationError
from clipwise.sampling.base import Indices
from clipwise.sampling.batch_structure import mapping_like, sequence_like

_MOST_COLUMNS = 4  # no training set has so few records, and few have more columns
_FROM_TABLE = "TensorDataset(torch.tensor(table[features].to_numpy()), torch.tensor(table[label].to_numpy()))"


def length_of(dataset: Any) -> int:
    """The number of records of a map-style data set. Raises for anything else."""
    kind = type(dataset).__name__
    hint = _what_to_pass(dataset)
    if hint is not None:
        raise ConfigurationError(f"dataset is a {kind}{hint}")
    if hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset):
        with suppress(TypeError, NotImplementedError):
            return len(dataset)
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


Collate = Callable[[list[Any]], Any]


class Fetcher(Dataset[Any]):
    """A map-style data set as batches: `fetcher[indices]` is the collated batch of those records.

    A `TensorDataset` is indexed without a Python call per record, unless there is a `collate_fn` or a subclass that
    overrides `__getitem__`.
    """

    def __init__(self, dataset: Any, collate_fn: Collate | None = None) -> None:
        if collate_fn is not None and not callable(collate_fn):
            raise ConfigurationError(
                f"collate_fn must be a function from a list of records to a batch, not {type(collate_fn).__name__}."
            )
        self.dataset_size = length_of(dataset)
        self.dataset = dataset
        self.collate_fn = collate_fn
        self._fetches_together = getattr(dataset, "__getitems__", None) is not None
        self._tensors: tuple[torch.Tensor, ...] | None = None
        is_plain = isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is TensorDataset.__getitem__
        if collate_fn is None and is_plain and not self._fetches_together:
            self._tensors = dataset.tensors
        self._empty: Any = None

    def __getitem__(self, indices: Indices) -> Any:
        if self._tensors is not None:
            rows = torch.from_numpy(indices)
            moved = {place: _moved(rows, place) for place in {t.device for t in self._tensors}}
            return [tensor.index_select(0, moved[tensor.device]) for tensor in self._tensors]
        if len(indices) == 0:
            return self.empty()
        return self._collate(self._records(indices.tolist()))

    def empty(self) -> Any:
        """A batch of no records, with the structure, shapes and dtypes of any other batch."""
        if self._tensors is not None:
            return self[np.empty(0, dtype=np.int64)]
        if self._empty is None:
            self._empty = self._make_empty()
        # A copy, so that a caller may change the batch in place.
        return copy.deepcopy(self._empty)

    def _make_empty(self) -> Any:
        # Copies, because some collate functions change their records.
        (record,) = self._records([0])
        one = self._collate([copy.copy(record)])
        two = self._collate([copy.copy(record), copy.copy(record)])
        with suppress(_UnknownStructureError):
            return _none_from_one_and_two(one, two)
        if self.collate_fn is not None:
            with suppress(Exception):  # its message could quote a record
                return self.collate_fn([])
        raise ConfigurationError(
            "collate_fn returns something whose form for an empty batch is not clear, and a sampled batch may be "
            "empty. Return tensors, lists, tuples or dicts in which one dimension counts the records, or give a "
            "collate_fn that also accepts []."
        )

    @property
    def is_mixing_possible(self) -> bool:
        """Whether user code handles several records at once: a `collate_fn` or a `__getitems__`."""
        return self._tensors is None and (self.collate_fn is not None or self._fetches_together)

    def arrangements(self, indices: Indices) -> list[Callable[[Sequence[int]], Any]]:
        """Functions that collate some of these records, given by position, in any order.

        With a `collate_fn` the records are fetched once, so that random augmentations of a record do not change. With a
        `__getitems__`, which may mix records itself, they are fetched again.
        """
        found: list[Callable[[Sequence[int]], Any]] = []
        if self._tensors is not None:
            return found
        if self.collate_fn is not None:
            records = self._records(indices.tolist())
            # Copies, because some collate functions change their records.
            found.append(lambda places: self._collate([copy.copy(records[place]) for place in places]))
        if self._fetches_together:
            found.append(lambda places: self[indices[list(places)]])
        return found

    def _records(self, indices: list[int]) -> list[Any]:
        if self._fetches_together:
            return list(self.dataset.__getitems__(indices))
        return [self.dataset[i] for i in indices]

    def _collate(self, records: list[Any]) -> Any:
        if self.collate_fn is not None:
            return self.collate_fn(records)
        try:
            return default_collate(records)
        except RuntimeError as error:
            if "equal size" not in str(error):
                raise
        # Torch's own message holds shapes of records and a position in the batch.
        raise ConfigurationError(
            "The records of a batch have different shapes, and default collation stacks them: give make_private a "
            "collate_fn that brings them to one shape, or a data set whose records have one."
        )


def _moved(rows: torch.Tensor, place: torch.device) -> torch.Tensor:
    """Move without a synchronization. Torch keeps pinned memory until the copy is done."""
    return rows.pin_memory().to(place, non_blocking=True) if place.type == "cuda" else rows.to(place)


class _UnknownStructureError(Exception):
    """A collated value has no dimension that grows with the number of records."""


def _none_from_one_and_two(one: Any, two: Any) -> Any:
    """The collation of no records, from the collations of one record and of the same record twice.

    A dimension that grows from 1 to 2 counts records and becomes 0; the others do not change. No value of the record is
    kept, not even in the memory of a view.
    """
    if one is None and two is None:
        return None
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        growth = [(a, b) for a, b in zip(one.shape, two.shape, strict=False) if a != b]
        if one.dim() == two.dim() and growth == [(1, 2)]:
            return one.new_empty([a if a == b else 0 for a, b in zip(one.shape, two.shape, strict=True)])
    elif type(one) is not type(two):
        raise _UnknownStructureError
    elif isinstance(one, Mapping) and one.keys() == two.keys():
        return mapping_like(one, {key: _none_from_one_and_two(one[key], two[key]) for key in one})
    elif isinstance(one, (list, tuple)):
        if (len(one), len(two)) == (1, 2):
            return type(one)()
        if len(one) == len(two):
            members = [_none_from_one_and_two(a, b) for a, b in zip(one, two, strict=True)]
            return sequence_like(one, members)
    raise _UnknownStructureError
