"""Tensors inside lists, tuples and mappings, as a loader hands them out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same structure, with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return type(value)({k: map_tensors(change, v) for k, v in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(change, v) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(change, v) for v in value)
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for member in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(member)
