"""Detect public data that shares records with the private data set.

Records are compared by origin, never by value: by the index in the same data set object, and by the memory address of
the inputs. No record is loaded.
"""

from __future__ import annotations

from collections import UserDict, defaultdict
from collections.abc import Hashable, Iterator
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, StackDataset, Subset, SubsetRandomSampler, TensorDataset

from clipwise.clipping import Strategy
from clipwise.errors import ConfigurationError
from clipwise.layers.public_statistics import AllPublicStatistics
from clipwise.sampling.base import Indices

_Source = tuple[Hashable, Indices]  # an object or a device, and record indices or addresses in it


def require_apart(dataset: Any, strategy: Strategy, statistics: AllPublicStatistics) -> None:
    """Raise if public data shares records with the private data set. Copies of private records are not detected."""
    used = [("public rows of normalization layers", rows) for rows in statistics.public_rows()]
    used += [(f"PublicData({public.name})", public.data) for public in strategy.public_data()]
    private = _gathered(_sources(dataset)) if used else {}
    for name, data in used:
        public = _gathered(_sources(data, in_batches=isinstance(data, (list, tuple))))
        if any(np.isin(public[space], private[space]).any() for space in public.keys() & private.keys()):
            raise ConfigurationError(
                f"{name}: the data that is marked as public holds records of the private data set. Results "
                "computed from it get no noise, so these records would have no privacy. Hold these records out: "
                "use them as public data only, and leave them out of dataset."
            )


def _gathered(sources: Iterator[_Source]) -> dict[Hashable, Indices]:
    by_space: dict[Hashable, list[Indices]] = defaultdict(list)
    for space, numbers in sources:
        by_space[space].append(numbers)
    return {space: np.concatenate(numbers) for space, numbers in by_space.items()}


def _sources(data: Any, rows: Indices | None = None, in_batches: bool = False) -> Iterator[_Source]:
    """Yield the origins of these records, by default of all; `in_batches` if a list holds batches."""
    if rows is None:
        rows = np.arange(max(1, length_hint(data)))
    if isinstance(data, DataLoader):
        yield from _sources(data.dataset, _sampled(data), in_batches=data.batch_sampler is None)
    elif isinstance(data, Subset):
        yield from _sources(data.dataset, _numbers(data.indices, data.dataset)[rows], in_batches)
    elif isinstance(data, ConcatDataset):
        for part, end in zip(data.datasets, data.cumulative_sizes, strict=True):
            begin = end - len(part)  # type: ignore[arg-type]
            yield from _sources(part, rows[(rows >= begin) & (rows < end)] - begin, in_batches)
    else:
        yield ("records of", id(data)), rows
        if isinstance(data, TensorDataset):  # inputs only: two data sets may share labels
            yield from _sources(data.tensors[0], rows)
        elif isinstance(data, StackDataset):
            columns = data.datasets
            yield from _sources(next(iter(columns.values() if isinstance(columns, dict) else columns)), rows)
        elif isinstance(data, (Tensor, np.ndarray)):
            yield from _row_addresses(data, rows)
        elif isinstance(data, (list, tuple)):
            for record in (data[i] for i in rows.tolist() if i < len(data)):
                inputs = _first_array(record)
                if inputs is not None:
                    inputs = inputs if in_batches else inputs[None]
                    yield from _row_addresses(inputs, np.arange(len(inputs)))


def _sampled(loader: DataLoader[Any]) -> Indices | None:
    """Return the indices that a loader reads if its sampler has a list of them; None for all."""
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, SubsetRandomSampler):
        sampler = sampler.indices
    is_list = isinstance(sampler, (list, tuple, range, Tensor, np.ndarray))
    return _numbers(sampler, loader.dataset) if is_list else None


def _numbers(indices: Any, data: Any) -> Indices:
    try:
        numbers = np.asarray(indices, dtype=np.int64)
    except (TypeError, ValueError):  # keys of a mapping
        return np.empty(0, dtype=np.int64)
    return np.where(numbers < 0, numbers + length_hint(data), numbers)


def _first_array(record: Any) -> Any:
    """Return the first array of a record or a batch, by convention its inputs; None if there is no array."""
    if isinstance(record, (dict, UserDict)):
        record = tuple(record.values())
    if isinstance(record, (list, tuple)):
        return next((found for member in record[:4] if (found := _first_array(member)) is not None), None)
    return record if isinstance(record, (Tensor, np.ndarray)) else None


def _row_addresses(array: Tensor | np.ndarray[Any, Any], rows: Indices) -> Iterator[_Source]:
    """Yield the addresses of rows; nothing for arrays without memory, and for one expanded row."""
    if isinstance(array, np.ndarray):
        device, address = torch.device("cpu"), array.__array_interface__["data"][0]
        stride = array.strides[0] if array.ndim else 0
    else:
        try:
            device, address = array.device, array.data_ptr()
            stride = array.stride(0) * array.element_size() if array.dim() else 0
        except RuntimeError:  # a sparse or nested tensor
            return
    if address and (stride or len(array) == 1):
        yield device, address + stride * rows
