"""Written: one gradient tensor per example (biases, norms, convolutions, all others).

Legend: B examples, b of them in a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from clipwise.gradients.blocks import Blocks
from clipwise.gradients.forms.base import (
    Budget,
    Form,
    as_real,
    at_least_float32,
    bytes_of,
    chunks,
    slices,
    squared_norms,
    zeroed,
)
from clipwise.gradients.precision import ieee_arithmetic

_blocks = Blocks(most_bytes=640 * 2**20)  # kept gradients (examples.py), and temporary pieces


class Written(Form):
    """One gradient per example, computed piece by piece, and kept from the norms to the sum if memory allows."""

    def __init__(
        self,
        batch: int,
        shape: torch.Size,
        dtype: torch.dtype,
        make: Callable[[slice], Tensor],
        piece: int | None = None,
    ) -> None:
        """`make` returns the gradients of some examples; `piece` is the number of examples that it computes fastest."""
        self.batch, self.shape, self.dtype = batch, shape, dtype
        self._make, self._piece = make, piece or max(1, batch)
        self._kept: list[Tensor] | None = None
        self._muted_B: Tensor | None = None

    @classmethod
    def of(cls, ready: Tensor) -> Written:
        """Wrap computed gradients, [B, *shape]."""
        written = cls(len(ready), ready.shape[1:], ready.dtype, lambda examples: ready[examples])
        written._kept = [ready]
        return written

    @classmethod
    def zeros(cls, batch: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Written:
        """Gradients of 0 for all examples."""
        return cls.of(torch.zeros((), dtype=dtype, device=device).expand(batch, *shape))

    @property
    def is_kept(self) -> bool:
        """Whether the measured gradients are kept for the sum."""
        return self._kept is not None

    def squared_norms(self, budget: Budget) -> Tensor:
        if self._kept is not None:
            return torch.cat([squared_norms(_flat(piece)) for piece in self._kept])
        keep = budget.take(bytes_of(self.batch, self.shape, self.dtype))
        kept, found = [], []
        for c in self._pieces() if keep else self._chunks():
            made = self._make(c)
            found.append(squared_norms(_flat(made)))
            if keep:
                kept.append(made)
        if keep:
            self._kept, self._make = kept, _made_before  # frees the inputs of `make`
        return torch.cat(found)

    def weighted_sum(self, w_B: Tensor) -> Tensor:
        if self._kept is not None:
            parts = (_combine(w, piece) for w, piece in zip(self._split(w_B), self._kept, strict=True))
        else:
            parts = (_combine(w_B[c], self.instantiate(c)) for c in self._chunks())
        total = next(parts)
        for part in parts:
            total += part
        return total

    def instantiate(self, examples: slice) -> Tensor:
        if self._kept is not None:
            return (self._kept[0] if len(self._kept) == 1 else torch.cat(self._kept))[examples]
        made = self._make(examples)
        return made if self._muted_B is None else zeroed(made, self._muted_B[examples])

    def mute(self, muted_B: Tensor) -> None:
        self._muted_B = muted_B
        if self._kept is not None:
            pairs = zip(self._kept, self._split(muted_B), strict=True)
            self._kept = [zeroed(piece, muted) for piece, muted in pairs]

    def _split(self, per_example_B: Tensor) -> list[Tensor]:
        assert self._kept is not None
        return list(torch.split(per_example_B, [len(piece) for piece in self._kept]))

    def _pieces(self) -> list[slice]:
        return slices(self.batch, self._piece)

    def _chunks(self) -> list[slice]:
        whole = chunks(self.batch, bytes_of(1, self.shape, self.dtype))
        return whole if whole[0].stop <= self._piece else self._pieces()


def real(form: Form) -> Form:
    """The real part of complex gradients, for forms that write them out."""
    if not form.dtype.is_complex:
        return form
    return Written(form.batch, form.shape, form.dtype.to_real(), lambda examples: form.instantiate(examples).real)


class Permuted(Form):
    """Gradients that are written out with their axes in another order."""

    def __init__(self, written: Written, order: Sequence[int]) -> None:
        """`order` gives, for each axis of this form's shape, the axis of `written`."""
        self._written, self._order = written, tuple(order)
        self.batch, self.dtype = written.batch, written.dtype
        self.shape = torch.Size(written.shape[axis] for axis in self._order)

    def squared_norms(self, budget: Budget) -> Tensor:
        return self._written.squared_norms(budget)

    def weighted_sum(self, w_B: Tensor) -> Tensor:
        return self._written.weighted_sum(w_B).permute(self._order)

    def instantiate(self, examples: slice) -> Tensor:
        return self._written.instantiate(examples).permute(0, *(axis + 1 for axis in self._order))

    def mute(self, muted_B: Tensor) -> None:
        self._written.mute(muted_B)


def _made_before(examples: slice) -> Tensor:
    raise AssertionError("these gradients are kept and must not be recomputed")


def written_products(left_bTm: Tensor, right_bTn: Tensor) -> Tensor:
    """sum_t left_t right_t^T of each example, [b, m, n]; on a CPU in reused memory."""
    size = torch.Size((len(left_bTm), left_bTm.shape[2], right_bTn.shape[2]))
    out = _blocks.take(size, left_bTm.dtype) if left_bTm.device.type == "cpu" else None
    return torch.bmm(left_bTm.mT, right_bTn, out=out)


def _flat(gradients: Tensor) -> Tensor:
    return gradients.reshape(len(gradients), -1)


@ieee_arithmetic()
def _combine(w_B: Tensor, gradients: Tensor) -> Tensor:
    """sum_i w_i gradient_i in IEEE products, so that the measured gradients are summed without rounding operands."""
    gradients = at_least_float32(gradients)
    flat = as_real(_flat(gradients))
    total = w_B.to(flat.dtype) @ flat
    if gradients.is_complex():
        total = torch.view_as_complex(total.view(-1, 2))
    return total.view(gradients.shape[1:])
