"""Public data that is the private data: a mistake that no type shows, and that objects in memory do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from clipwise.clipping import Strategy
from clipwise.clipping.norm_policy import NormPolicy
from clipwise.clipping.public import Public
from clipwise.errors import ConfigurationError
from clipwise.layers.all_public_statistics import AllPublicStatistics


def require_apart(dataset: Any, strategy: Strategy, statistics: AllPublicStatistics) -> None:
    """Refuse public data that shares records with the private data set, as far as objects and memory tell.

    It looks at no values: a copy of private records passes for public, and only its owner can know better.
    """
    for who, public in _used_as_public(strategy, statistics):
        if _share_records(dataset, public):
            raise ConfigurationError(
                f"{who}: the data that is marked as public holds records of the private data set. What is computed of "
                "it gets no noise, so these records would have no privacy. Hold records out for it: use them there, "
                "and leave them out of dataset."
            )


def _used_as_public(strategy: Strategy, statistics: AllPublicStatistics) -> Iterator[tuple[str, Any]]:
    parts = getattr(strategy, "parts", None)
    if isinstance(parts, NormPolicy) and isinstance(parts.public, Public):
        yield f"Public({parts.public.name})", parts.public.data
    for rows in statistics.public_rows():
        yield "public rows of normalization layers", rows


def _share_records(one: Any, other: Any) -> bool:
    (data, rows), (public, public_rows) = _origin(one), _origin(other)
    if data is public:
        return rows is None or public_rows is None or not set(rows).isdisjoint(public_rows)
    if rows is not None or public_rows is not None:
        return False  # parts of two data sets: there is nothing to compare
    inputs, public_inputs = _inputs(data), _inputs(public)
    return inputs is not None and public_inputs is not None and _overlap(inputs, public_inputs)


def _origin(data: Any) -> tuple[Any, list[int] | None]:
    """The data set behind subsets, and which of its records are left; None for all of them."""
    rows: list[int] | None = None
    if isinstance(data, DataLoader):
        data = data.dataset
    while isinstance(data, Subset):
        here = [int(i) for i in data.indices]
        rows = here if rows is None else [here[i] for i in rows]
        data = data.dataset
    return data, rows


def _inputs(data: Any) -> Tensor | None:
    """Of records that are tensors: labels of two data sets may well be the same."""
    if isinstance(data, TensorDataset):
        return data.tensors[0]
    return data if isinstance(data, Tensor) else None


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether they have memory in common. What is not in one piece, as every second row, is not looked at."""
    if one.device != other.device or not (one.is_contiguous() and other.is_contiguous()):
        return False
    (begin, end), (other_begin, other_end) = _range(one), _range(other)
    return begin < other_end and other_begin < end


def _range(t: Tensor) -> tuple[int, int]:
    return t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()
