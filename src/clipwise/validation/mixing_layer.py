"""Where examples meet: the first layer whose output for one example moves when only another one is replaced.

Two passes are compared, layer call by layer call. A layer that mixes examples gets rows that did not move and gives
rows that did; every layer after it gets moved rows, and is not to blame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.sampling.batch_structure import tensors_in


@dataclass(frozen=True)
class Call:
    """One call of a layer: what went in and what came out."""

    name: str
    kind: str
    inputs: list[Tensor]
    outputs: list[Tensor]

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"layer {self.name!r} ({self.kind})" if self.name else f"the model's own forward ({self.kind})"


def first_meeting(
    model: nn.Module, before: Callable[[], object], after: Callable[[], object], place: int, size: int
) -> str | None:
    """A layer's name and kind, or None if examples meet outside of all layers.

    Args:
        model: whose layers are looked at.
        before: runs model and loss on a batch.
        after: the same with the example at `place` replaced.
        place: which one.
        size: the number of examples.
    """
    with recorded(model) as calls:
        before()
    with recorded(model) as again:
        after()
    for one, other in zip(calls, again, strict=False):
        if one.name != other.name:
            return None  # which layers run depends on the batch: nothing can be compared
        moved_in = _any_mixed(one.inputs, other.inputs, place, size)
        if not moved_in and _any_mixed(one.outputs, other.outputs, place, size):
            return one.label
    return None


def first_random(model: nn.Module, before: Callable[[], object], after: Callable[[], object]) -> str | None:
    """The first layer that gives something else for the same input, in two passes with other random numbers."""
    with recorded(model) as calls:
        before()
    with recorded(model) as again:
        after()
    for one, other in zip(calls, again, strict=False):
        pairs = [
            list(zip(*sides, strict=False))
            for sides in ((one.inputs, other.inputs), (one.outputs, other.outputs))
        ]
        same_in, same_out = (all(torch.equal(a, b) for a, b in sides) for sides in pairs)
        if same_in and not same_out:
            return one.label
    return None


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[Call]]:
    """In this block every call of a layer is written down, in the order in which calls end."""
    calls: list[Call] = []

    def ended(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            copies = [[t.detach().clone() for t in tensors_in(x)] for x in ([*args, kwargs], output)]
            calls.append(Call(name, type(module).__name__, *copies))

        return hook

    handles = [
        module.register_forward_hook(ended(name), with_kwargs=True) for name, module in model.named_modules()
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _any_mixed(before: list[Tensor], after: list[Tensor], place: int, size: int) -> bool:
    return any(_is_mixed(a, b, place, size) for a, b in zip(before, after, strict=False))


def _is_mixed(before: Tensor, after: Tensor, place: int, size: int) -> bool:
    """Whether more moved than the rows of one example, wherever those may lie."""
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    if before.is_floating_point():
        tolerance = 1e-5 * float(before.nan_to_num().abs().max().clamp_min(1e-30)) if before.numel() else 0.0
        moved = ~torch.isclose(before, after, rtol=0.0, atol=tolerance, equal_nan=True)
    else:
        moved = before != after
    if not bool(moved.any()):
        return False
    others = torch.tensor([i for i in range(size) if i != place], device=moved.device)
    stays = (not bool(view.index_select(axis, others).any()) for view, axis in _layouts(moved, size))
    return not any(stays)


def _layouts(t: Tensor, size: int) -> Iterator[tuple[Tensor, int]]:
    """Every way in which a tensor can hold the examples: along an axis, or folded into the first one."""
    for axis in range(t.dim()):
        if t.shape[axis] == size:
            yield t, axis
    if t.dim() and t.shape[0] > size and t.shape[0] % size == 0:
        folded = t.shape[0] // size
        yield t.reshape(size, folded, *t.shape[1:]), 0
        yield t.reshape(folded, size, *t.shape[1:]), 1
