"""Which rows of a tensor belong to which example.

Never guessed from sizes: a sequence can be as long as the batch is large, and attention runs its output
projection on T*B rows even in a batch-first model. A *probe* decides. The gradient is linear in the
weights r_i of sum_i r_i loss_i, so a row that belongs to example i alone has

    gradient(sum_i r_i loss_i)[row] = r_i * gradient(sum_i loss_i)[row],

exactly, when r_i is a power of two (scaling by one commutes with rounding). One extra backward pass thus
tests every row of every tensor at once: a layout is right if all of its rows agree, and a tensor on
which no layout agrees mixes examples or has no example axis.

Legend: B examples in the batch; an axis of size outer * B * inner holds example (index // inner) % B.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_LEVELS = 13  # probe weights are 2^0 .. 2^12: scaling up cannot push a gradient into the denormals


@dataclass(frozen=True)
class Layout:
    """Where the examples of a batch lie in a tensor: along `axis`, as (outer, batch, inner)."""

    axis: int
    outer: int
    batch: int
    inner: int

    def split(self, t: Tensor) -> Tensor:
        """[..., outer*B*inner, ...] -> [B, ..., outer, inner, ...] (a view where strides allow)."""
        a = self.axis
        sizes = (*t.shape[:a], self.outer, self.batch, self.inner, *t.shape[a + 1 :])
        return t.reshape(sizes).movedim(a + 1, 0)

    def rows(self, t: Tensor) -> Tensor:
        """[..., n] -> [B, T, n]: every position of an example in one middle dimension."""
        split = self.split(t)
        return split.reshape(self.batch, -1, split.shape[-1])

    def along_axis(self, per_example_B: Tensor) -> Tensor:
        """One number an example, laid out along the axis: [outer*B*inner]."""
        return per_example_B.repeat_interleave(self.inner).repeat(self.outer)

    def scale(self, t: Tensor, per_example_B: Tensor) -> Tensor:
        """Multiply the rows of example i by the i-th number."""
        shape = [1] * t.dim()
        shape[self.axis] = -1
        return t * self.along_axis(per_example_B).to(t.dtype).view(shape)

    def resized(self, shape: torch.Size, batch: int) -> Layout | None:
        """The same layout for another batch and another number of rows, if that is without doubt."""
        if self.axis >= len(shape) or shape[self.axis] % batch:
            return None
        k = shape[self.axis] // batch
        if self.outer == 1 and self.inner == 1:
            return Layout(self.axis, 1, batch, 1) if k == 1 else None
        if self.outer == 1:
            return Layout(self.axis, 1, batch, k)
        if self.inner == 1:
            return Layout(self.axis, k, batch, 1)
        return Layout(self.axis, self.outer, batch, self.inner) if k == self.outer * self.inner else None


def hypotheses(shape: torch.Size, batch: int) -> Iterator[Layout]:
    """Every way in which `batch` examples could lie in a tensor of this shape."""
    for axis, size in enumerate(shape):
        if size == 0 or size % batch:
            continue
        k = size // batch
        for outer in range(1, k + 1):
            if k % outer == 0:
                yield Layout(axis, outer, batch, k // outer)


def probe_weights(batch: int, like: Tensor) -> Tensor:
    """Random powers of two, as distinct as the batch allows."""
    levels = torch.arange(batch) % _LEVELS
    return (2.0 ** levels[torch.randperm(batch)]).to(device=like.device, dtype=like.dtype)


@dataclass(frozen=True)
class Probe:
    """The gradients of the plain and of the weighted sum of losses with respect to one tensor."""

    plain: Tensor
    weighted: Tensor
    weights_B: Tensor

    def agrees(self, layout: Layout) -> bool:
        """Whether every live, finite row has exactly the weight of the example that owns it here."""
        expected = layout.scale(self.plain, self.weights_B).double()
        actual = self.weighted.double()
        others = [d for d in range(expected.dim()) if d != layout.axis]
        error, size = (expected - actual).square(), expected.square() + actual.square()
        if others:
            error, size = error.sum(others), size.sum(others)
        tolerance = 1e-10 if self.plain.device.type == "cpu" else 1e-6  # squared; atomics reorder sums
        return bool(((error <= tolerance * size) | ~torch.isfinite(error)).all())

    def is_dead(self) -> bool:
        """No gradient at all arrives here, so this batch decides nothing."""
        return not bool((self.plain != 0).any())

    def first_layout(self) -> Layout | None:
        """Any layout that the shape allows."""
        return next(hypotheses(self.plain.shape, len(self.weights_B)), None)

    def layouts(self) -> list[Layout]:
        """The layouts that survive."""
        return [h for h in hypotheses(self.plain.shape, len(self.weights_B)) if self.agrees(h)]
