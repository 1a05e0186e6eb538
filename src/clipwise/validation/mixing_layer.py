"""Find the first layer that mixes examples.

Two passes, before and after one example is replaced, are compared call by call. In the first layer that mixes examples,
the other examples' inputs are unchanged and their outputs change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.sampling.batch_structure import tensors_in

Pass = Callable[[], object]  # runs model and loss on a batch
Differ = Callable[[list[Tensor], list[Tensor]], bool]


@dataclass(frozen=True)
class Call:
    """Inputs and outputs of one layer call."""

    name: str
    kind: str
    inputs: list[Tensor]
    outputs: list[Tensor]

    @property
    def label(self) -> str:
        """The layer's name in messages."""
        return f"layer {self.name!r} ({self.kind})" if self.name else f"the model's own forward ({self.kind})"


def first_mixing(model: nn.Module, before: Pass, after: Pass, place: int, size: int) -> str | None:
    """Return the first layer that mixes examples, or None if they are mixed outside of all layers.

    `after` is the pass `before` with the example at index `place`, of `size` examples, replaced.
    """

    def are_mixed(one: list[Tensor], other: list[Tensor]) -> bool:
        return any(_is_mixed(a, b, place, size) for a, b in zip(one, other, strict=False))

    return _first(model, before, after, are_mixed)


def first_random(model: nn.Module, before: Pass, after: Pass) -> str | None:
    """Return the first layer with equal inputs and different outputs in two passes with different random numbers."""

    def are_other(one: list[Tensor], other: list[Tensor]) -> bool:
        return not all(torch.equal(a, b) for a, b in zip(one, other, strict=False))

    return _first(model, before, after, are_other)


def _first(model: nn.Module, before: Pass, after: Pass, differ: Differ) -> str | None:
    """Return the first layer with inputs that do not differ between two passes and outputs that do."""
    with recorded(model) as calls:
        before()
    with recorded(model) as again:
        after()
    for one, other in zip(calls, again, strict=False):
        if one.name != other.name:
            return None  # the layers that run depend on the batch: nothing can be compared
        if not differ(one.inputs, other.inputs) and differ(one.outputs, other.outputs):
            return one.label
    return None


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[Call]]:
    """Record every layer call in this block, in the order in which calls end."""
    calls: list[Call] = []

    def ended(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            copies = [[t.detach().clone() for t in tensors_in(x)] for x in ([*args, kwargs], output)]
            calls.append(Call(name, type(module).__name__, *copies))

        return hook

    handles = [m.register_forward_hook(ended(name), with_kwargs=True) for name, m in model.named_modules()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _is_mixed(before: Tensor, after: Tensor, place: int, size: int) -> bool:
    """Whether rows of other examples moved, in every layout of examples that the shape allows."""
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    moved = before != after
    if before.is_floating_point():
        tolerance = 1e-5 * float(before.nan_to_num().abs().max().clamp_min(1e-30)) if before.numel() else 0.0
        moved = ~torch.isclose(before, after, rtol=0.0, atol=tolerance, equal_nan=True)
    if not bool(moved.any()):
        return False
    others = torch.tensor([i for i in range(size) if i != place], device=moved.device)
    return all(bool(view.index_select(axis, others).any()) for view, axis in _layouts(moved, size))


def _layouts(t: Tensor, size: int) -> Iterator[tuple[Tensor, int]]:
    """Yield every possible layout of the examples: along an axis, or folded into the first one."""
    for axis in range(t.dim()):
        if t.shape[axis] == size:
            yield t, axis
    if t.dim() and t.shape[0] > size and t.shape[0] % size == 0:
        folded = t.shape[0] // size
        yield t.reshape(size, folded, *t.shape[1:]), 0
        yield t.reshape(folded, size, *t.shape[1:]), 1
