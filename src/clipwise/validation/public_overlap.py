"""Public data that is the private data: a mistake that no type shows, and that objects in memory do.

Where records are is written as ranges: of addresses in a device's memory, for tensors that are there already,
and of record numbers in any data set, which is all that can be told of one that loads its records. No record
is read.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Hashable, Iterable, Iterator
from functools import lru_cache
from operator import length_hint
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from clipwise.clipping import Strategy
from clipwise.errors import ConfigurationError
from clipwise.layers.all_public_statistics import AllPublicStatistics
from clipwise.sampling.schemes import Indices

_Array = Tensor | NDArray[Any]
_CPU = torch.device("cpu")
_LAST = 2**62  # beyond every number of a record
_FEW = 4  # members of a record among which a tensor is looked for: a long list of numbers has none


class _Ranges(NamedTuple):
    """Numbers from each of `begins` to below each of `ends`; they mean the same only in the same space."""

    space: Hashable
    begins: Indices | list[int]
    ends: Indices | list[int]


_Places = dict[Hashable, tuple[Indices, Indices]]  # by space: where ranges begin and end


def require_apart(dataset: Any, strategy: Strategy, statistics: AllPublicStatistics) -> None:
    """Refuse public data that shares records with the private data set, as far as objects and memory tell.

    It looks at no values: a copy of private records passes for public, and only its owner can know better.
    """
    used = list(_used_as_public(strategy, statistics))
    private = _gathered(_ranges(dataset)) if used else {}
    for who, public in used:
        in_batches = isinstance(public, (list, tuple))  # as Public reads them
        if _meet(private, _gathered(_ranges(public, in_batches=in_batches))):
            raise ConfigurationError(
                f"{who}: the data that is marked as public holds records of the private data set. What is "
                "computed of it gets no noise, so these records would have no privacy. Hold records out for "
                "it: use them there, and leave them out of dataset."
            )


def _used_as_public(strategy: Strategy, statistics: AllPublicStatistics) -> Iterator[tuple[str, Any]]:
    for public in strategy.public_data():
        yield f"Public({public.name})", public.data
    for rows in statistics.public_rows():
        yield "public rows of normalization layers", rows


def _gathered(found: Iterable[_Ranges]) -> _Places:
    by_space: dict[Hashable, list[_Ranges]] = {}
    for ranges in found:
        by_space.setdefault(ranges.space, []).append(ranges)
    return {
        space: (np.concatenate([r.begins for r in each]), np.concatenate([r.ends for r in each]))
        for space, each in by_space.items()
    }


def _meet(one: _Places, other: _Places) -> bool:
    return any(_overlap(*one[space], *other[space]) for space in one.keys() & other.keys())


def _overlap(begins: Indices, ends: Indices, other_begins: Indices, other_ends: Indices) -> bool:
    """Whether some range has a number in common with one of the others. None of them is empty."""
    order = np.argsort(begins)
    begun = np.searchsorted(begins[order], other_ends)  # how many begin before the other one ends
    furthest = np.concatenate([[-1], np.maximum.accumulate(ends[order])])
    return bool((furthest[begun] > other_begins).any())


def _ranges(data: Any, rows: Indices | None = None, in_batches: bool = False) -> Iterator[_Ranges]:
    """Where these records of a data set are, or all; `in_batches` if members of a list are batches."""
    if isinstance(data, DataLoader):
        yield from _ranges(data.dataset, _picked(data), in_batches=data.batch_sampler is None)
    elif isinstance(data, Subset):
        here = _numbers(data.indices, data.dataset)
        yield from _ranges(data.dataset, here if rows is None else here[rows], in_batches)
    elif isinstance(data, ConcatDataset):
        for part, rows_of_part in _parts(data, rows):
            yield from _ranges(part, rows_of_part, in_batches)
    else:
        yield _by_number(data, rows)
        yield from _in_memory(data, rows, in_batches)


def _picked(loader: DataLoader[Any]) -> Indices | None:
    """Which records a loader reads, if its sampler has a list of them; None for all."""
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, SubsetRandomSampler):
        sampler = sampler.indices
    if isinstance(sampler, (list, tuple, range, Tensor, np.ndarray)):
        return _numbers(sampler, loader.dataset)
    return None


def _numbers(indices: Iterable[Any], data: Any) -> Indices:
    if isinstance(indices, (Tensor, np.ndarray)):
        indices = indices.tolist()
    try:
        numbers = np.fromiter(map(int, indices), dtype=np.int64)
    except (TypeError, ValueError):  # keys: where they lead cannot be told
        return np.empty(0, dtype=np.int64)
    is_from_the_end = numbers < 0
    return numbers + is_from_the_end * length_hint(data) if is_from_the_end.any() else numbers


def _parts(data: ConcatDataset[Any], rows: Indices | None) -> Iterator[tuple[Any, Indices | None]]:
    """The data sets of a concatenation, and which of their records are meant."""
    if rows is None:
        yield from ((part, None) for part in data.datasets)
        return
    rows, firsts = np.sort(rows), np.array([0, *data.cumulative_sizes])
    cuts = np.searchsorted(rows, firsts)
    for part, first, begin, end in zip(data.datasets, firsts[:-1], cuts[:-1], cuts[1:], strict=True):
        yield part, rows[begin:end] - first


def _by_number(data: Any, rows: Indices | None) -> _Ranges:
    """Records of an object, whatever it is: the same object gives the same record for a number."""
    space = ("records of", id(data))
    return _Ranges(space, [0], [_LAST]) if rows is None else _Ranges(space, rows, rows + 1)


def _in_memory(data: Any, rows: Indices | None, in_batches: bool) -> Iterator[_Ranges]:
    """Of records that are tensors, where their inputs are: labels of two data sets may well be the same."""
    if isinstance(data, TensorDataset):
        yield from _ranges(data.tensors[0], rows)
    elif isinstance(data, StackDataset):
        columns = data.datasets
        yield from _ranges(next(iter(columns.values() if isinstance(columns, dict) else columns)), rows)
    elif isinstance(data, (Tensor, np.ndarray)):
        yield from _of_rows(data, rows)
    elif isinstance(data, (list, tuple)):
        members = data if rows is None else [data[i] for i in rows.tolist()]
        inputs = [found for found in map(_first_array, members) if found is not None]
        if in_batches:
            for batch in inputs:
                yield from _of_rows(batch, None)
        else:
            yield from _of_records(inputs)


def _first_array(record: Any) -> _Array | None:
    """The inputs of a record or a batch, by the custom that they come first."""
    if isinstance(record, (Tensor, np.ndarray)):
        return record
    if isinstance(record, (dict, UserDict)):  # other mappings may load what they give
        record = tuple(record.values())
    if isinstance(record, (list, tuple)):
        for member in record[:_FEW]:
            found = _first_array(member)
            if found is not None:
                return found
    return None


class _Layout(NamedTuple):
    """Where a tensor lies; strides and sizes in bytes."""

    space: Hashable
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


def _layout(array: _Array) -> _Layout | None:
    """None if it has no elements, or no memory that can be compared."""
    if isinstance(array, np.ndarray):
        address = array.__array_interface__["data"][0]
        found = _Layout(_CPU, address, array.shape, array.strides, array.itemsize)
        return found if array.size else None
    if array.layout is not torch.strided or array.is_nested or array.is_meta or not array.numel():
        return None
    size = array.element_size()
    strides = tuple([size * stride for stride in array.stride()])
    try:
        return _Layout(array.device, array.data_ptr(), array.shape, strides, size)
    except RuntimeError:  # a tensor that stands for others has no memory of its own
        return None


def _of_rows(array: _Array, rows: Indices | None) -> Iterator[_Ranges]:
    """Where the rows of a tensor are, or the first piece of each if a row is not in one piece."""
    found = _layout(array)
    if found is None or not found.shape:
        return
    count, stride = found.shape[0], found.strides[0]
    reach = _reach(found.shape[1:], found.strides[1:], found.itemsize)
    if count > 1:  # rows that overlap, as windows of a series do, are told by where they begin
        reach = min(reach, abs(stride))
    if reach == 0:  # one row again and again, such as a constant: it tells no records apart
        return
    if rows is None and reach == stride:  # side by side: no need to list them
        yield _Ranges(found.space, [found.address], [found.address + count * reach])
        return
    begins = found.address + stride * (np.arange(count) if rows is None else rows)
    yield _Ranges(found.space, begins, begins + reach)


def _of_records(arrays: Iterable[_Array]) -> Iterator[_Ranges]:
    """Where tensors are that are one record each, or the first piece of those that are not in one piece."""
    begins: dict[Hashable, list[int]] = {}
    ends: dict[Hashable, list[int]] = {}
    for array in arrays:
        found = _layout(array)
        if found is not None:
            reach = _reach(found.shape, found.strides, found.itemsize)
            begins.setdefault(found.space, []).append(found.address)
            ends.setdefault(found.space, []).append(found.address + reach)
    for space in begins:
        yield _Ranges(space, begins[space], ends[space])


@lru_cache
def _reach(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> int:
    """How many bytes are filled without a gap from the first element on, in whatever order dimensions lie."""
    reach = itemsize
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if not 0 <= stride <= reach:
                break
            reach += (size - 1) * stride
    return reach
