"""Pieces of a batch: cut to a constant size, padded with repeated rows of weight 0; and their bounded sums.

Legend: B examples of a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from clipwise.engine.context import StepContext
from clipwise.errors import StepError
from clipwise.sampling.batch_structure import map_tensors, tensors_in
from clipwise.validation.step_inputs import require_losses


class FixedRows:
    """Memory for the rows of a piece of constant size: the inputs of a compiled step.

    Attributes:
        size: the number of examples.
        batch: the rows, in the structure of a batch.
        real_B: False for padding.
    """

    def __init__(self, batch: Sequence[Any], size: int, views: int, device: torch.device) -> None:
        if not _is_all_tensors(batch):
            raise RuntimeError("the batch holds values that are not tensors")
        self.size, self._views, self._device = size, views, device
        first = torch.arange(size * views, device=device) % count_of(batch)
        self.batch = map_tensors(lambda t: _rows(t, first), tuple(batch))
        self.real_B = torch.ones(size, dtype=torch.bool, device=device)

    def matches(self, rows: Sequence[Any]) -> bool:
        """Whether rows have the structure, shapes and dtypes of these."""
        return kinds_of(rows) == kinds_of(self.batch)

    def fill(self, rows: Sequence[Any], count: int) -> None:
        """Copy the rows of `count` examples, and pad."""
        if count < self.size:
            again = torch.arange(self.size * self._views, device=self._device) % (count * self._views)
            rows = map_tensors(lambda t: _rows(t, again), rows)
        for own, given in zip(tensors_in(self.batch), tensors_in(rows), strict=True):
            own.copy_(given.detach())
        self.real_B.fill_(True)
        self.real_B[count:] = False


def over_views(context: StepContext, losses: Tensor, size: int) -> Tensor:
    """One loss per example: the mean over its views."""
    views = context.plan.views
    is_whole = context.strategy.is_coupled and isinstance(losses, Tensor) and losses.dim() == 0
    if views is None or is_whole:
        return losses
    if not isinstance(losses, Tensor) or losses.shape != (size * views.count,):
        raise StepError(
            "losses must have one entry for each row of the batch from private.loader: with augmentation_multiplicity "
            f"there are {views.count} rows per example. private.step takes their mean."
        )
    return views.mean(losses)


def clipped_rows(
    context: StepContext, loss: Callable[..., Tensor], rows: Sequence[Any], size: int
) -> dict[str, Tensor]:
    """The bounded sum of the rows of `size` examples, computed eagerly with a loss that clipwise calls."""
    losses = over_views(context, loss(*rows), size)
    losses = require_losses(losses, size, context.strategy.is_coupled)
    return context.clipper.clipped_sum(losses)


def padded_rows(
    context: StepContext, loss: Callable[..., Tensor], rows: Sequence[Any], real_B: Tensor
) -> tuple[dict[str, Tensor], Tensor | None]:
    """`clipped_rows` for rows of which some are padding, without waiting for the device.

    The second result is whether a rare case happened (gradients/precision.py), on the device. Then the sum is invalid.
    """
    is_coupled, size = context.strategy.is_coupled, len(real_B)
    with context.clipper.putting_aside() as aside:
        losses = require_losses(over_views(context, loss(*rows), size), size, is_coupled)
        clipped = context.clipper.clipped_sum(losses, None if is_coupled else real_B)
    return clipped, aside.happened()


def pieces_of(batch: Sequence[Any], count: int, size: int, views: int) -> Iterator[tuple[Sequence[Any], int]]:
    """The rows of `count` examples, at most `size` examples at a time, and the number of examples in each piece."""
    if 0 < count <= size:
        yield batch, count
        return
    for start in range(0, count, size):
        rows = slice(start * views, (start + size) * views)
        piece = map_tensors(lambda t, rows=rows: t[rows] if t.dim() else t, batch)  # type: ignore[misc]
        yield piece, min(size, count - start)


def count_of(batch: Sequence[Any]) -> int:
    """The number of rows of a batch."""
    return next((len(t) for t in tensors_in(batch) if t.dim()), 0)


def kinds_of(value: Any) -> object:
    """The structure of a batch, with the row shape and dtype of each tensor."""
    if isinstance(value, Tensor):
        return value.dim(), value.shape[1:], value.dtype
    if isinstance(value, Mapping):
        return [(key, kinds_of(member)) for key, member in value.items()]
    return [kinds_of(member) for member in value] if isinstance(value, (list, tuple)) else type(value)


def _rows(t: Tensor, rows: Tensor) -> Tensor:
    """These rows of a tensor, detached."""
    return t.detach()[rows] if t.dim() else t.detach().clone()


def _is_all_tensors(value: Any) -> bool:
    """Whether a batch holds only tensors and None: any other value would be a constant of the graph."""
    if isinstance(value, (list, tuple, Mapping)):
        return all(map(_is_all_tensors, value.values() if isinstance(value, Mapping) else value))
    return value is None or isinstance(value, Tensor)
