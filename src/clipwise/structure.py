"""What a batch is made of, as a loader hands it out, and the modes of what a model is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


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


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In this block the model is in `.eval()`: no dropout, and no running statistics of what runs through."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
