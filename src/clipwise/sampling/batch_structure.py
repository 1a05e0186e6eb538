"""Nested structures of tensors in a batch, and evaluation mode of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def arguments_of(batch: Any) -> tuple[Any, ...]:
    """The arguments of a loss: `loss(*batch)` for a list or tuple, `loss(batch)` for a mapping or a tensor."""
    return tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same structure, with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    return _map_members(lambda member: map_tensors(change, member), value)


def take_rows(batch: Any, rows: Sequence[int], size: int) -> Any:
    """These rows of a batch of `size` rows, in this order, as detached copies.

    Lists of plain values, such as texts, count as rows too. Members without `size` rows do not change.
    """
    if isinstance(batch, Tensor):
        if batch.dim() == 0 or len(batch) != size:
            return batch.detach().clone()
        return batch.detach()[torch.tensor(rows, dtype=torch.long, device=batch.device)]
    if isinstance(batch, (list, tuple)) and len(batch) == size and not any(map(_is_nested, batch)):
        return sequence_like(batch, [batch[row] for row in rows])
    return _map_members(lambda member: take_rows(member, rows, size), batch)


def with_zeros(batch: Any, rows: slice, size: int, only_floats: bool = False) -> Any:
    """A copy of a batch of `size` rows with zeros in some rows of its tensors, or only of floating-point ones."""

    def zeroed(t: Tensor) -> Tensor:
        if t.dim() == 0 or len(t) != size or (only_floats and not t.is_floating_point()):
            return t
        changed = t.detach().clone()
        changed[rows] = 0
        return changed

    return map_tensors(zeroed, batch)


def _is_nested(value: Any) -> bool:
    return isinstance(value, (Tensor, Mapping, list, tuple))


def _map_members(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, Mapping):
        return mapping_like(value, {key: change(member) for key, member in value.items()})
    if isinstance(value, (list, tuple)):
        return sequence_like(value, [change(member) for member in value])
    return value


def mapping_like(example: Mapping[Any, Any], content: dict[Any, Any]) -> Mapping[Any, Any]:
    """A new mapping of the same type, or a dict if its type cannot be built from one."""
    try:
        return type(example)(content)  # type: ignore[call-arg]
    except TypeError:
        return content


def sequence_like(example: list[Any] | tuple[Any, ...], members: list[Any]) -> Sequence[Any]:
    """A list or tuple of the same type, with other members."""
    return type(example)(*members) if hasattr(example, "_fields") else type(example)(members)


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor, in order."""
    if isinstance(value, Tensor):
        return [value]
    if not isinstance(value, (list, tuple, Mapping)):
        return []
    members = value.values() if isinstance(value, Mapping) else value
    return [tensor for member in members for tensor in tensors_in(member)]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which the model is in `.eval()`: no dropout, no updates of running statistics."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
