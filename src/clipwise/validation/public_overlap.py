"""Detect public data that shares records with the private data set.

Records are compared by origin, never by value: by the index in the same data set object, and by the memory address of
the inputs. No record is loaded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from operator import length_hint
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, RandomSampler, SequentialSampler, Subset, TensorDataset

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
        public = _gathered(_sources(data))
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


def _sources(data: Any, rows: Indices | None = None) -> Iterator[_Source]:
    """Yield the origins of these records, by default of all."""
    if rows is None:
        rows = np.arange(max(1, length_hint(data)))
    if isinstance(data, DataLoader):
        if isinstance(data.sampler, (SequentialSampler, RandomSampler)):  # others may leave records out
            yield from _sources(data.dataset)
    elif isinstance(data, Subset):
        numbers = np.asarray(data.indices, dtype=np.int64)[rows]
        yield from _sources(data.dataset, np.where(numbers < 0, numbers + length_hint(data.dataset), numbers))
    elif isinstance(data, ConcatDataset):
        for part, end in zip(data.datasets, data.cumulative_sizes, strict=True):
            begin = end - len(part)  # type: ignore[arg-type]
            yield from _sources(part, rows[(rows >= begin) & (rows < end)] - begin)
    else:
        yield ("records of", id(data)), rows
        if isinstance(data, TensorDataset):  # inputs only: two data sets may share labels
            yield from _sources(data.tensors[0], rows)
        elif isinstance(data, Tensor):
            yield from _row_addresses(data, rows)


def _row_addresses(inputs: Tensor, rows: Indices) -> Iterator[_Source]:
    """Yield the addresses of rows; nothing for tensors without memory, and for one expanded row."""
    try:
        address, stride = inputs.data_ptr(), inputs.stride(0) * inputs.element_size() if inputs.dim() else 0
    except RuntimeError:  # a sparse or nested tensor
        return
    if address and (stride or len(inputs) == 1):
        yield inputs.device, address + stride * rows
