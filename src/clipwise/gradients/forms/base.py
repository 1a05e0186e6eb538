"""The interface of all forms of per-example gradients, bounds on norms, and `Written`: one tensor per example.

Norms are *upper bounds in the arithmetic used*, squared and in float64. A computed norm can be too small for three
reasons: rounding in the sum of squares (`squared_norms` bounds it), positions that cancel in a Gram product, and
positions that cancel in the product that later forms the weighted sum. The rounding error of that product grows with
the *mass* M = sum_t |left_t| |right_t| and not with the norm. If the gradient is not written out, the bound is
therefore n + c u M, with u the unit roundoff of the product. An example with a bound that is loose by more than 1e-5 is
written out in float64 instead (outer.py).

With products in less than IEEE arithmetic (precision.py), rounded operands change an example's part of the sum by up to
e M more. This error is not part of the norm; it is kept separately in `squared_error_B`.

Legend: B examples (b of them in a piece), T positions, m and n the sides of a weight; w_B one weight per example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from clipwise import kernels
from clipwise.gradients.blocks import Blocks
from clipwise.gradients.precision import IEEE, Arithmetic, Rare, ieee_arithmetic
from clipwise.kernels.gram import Last
from clipwise.kernels.squares import row_squares
from clipwise.kernels.tracing import is_tracing

CHUNK_BYTES = 64 * 2**20  # limit on per-example gradients written out at a time
_BLOCK = 256  # squares are summed in blocks of this length in the tensor's own dtype, then in float64
PRODUCT_ERROR = 4.0  # c in the bound n + c u M
LOOSE = 1e-5  # the largest acceptable relative width of the bound
NEGLIGIBLE = 1e-12  # norms below this are never clipped, so their bound may be loose
_KERNELS_ON_CPU = kernels.usable(torch.empty(0))  # in Triton's interpreter
_blocks = Blocks(most_bytes=896 * 2**20)  # kept gradients (examples.py), and temporary pieces


class Budget:
    """Bytes that per-example gradients may occupy from the norms to the weighted sum, and the arithmetic."""

    def __init__(self, total_bytes: int, arithmetic: Arithmetic = IEEE) -> None:
        self.left = total_bytes
        self.arithmetic = arithmetic
        self.last_products: Last | None = None  # caches of outer.py
        self.last_scaled: Last | None = None
        self._last_squares = Last()

    def squared_norms(self, x_Bn: Tensor) -> Tensor:
        """`squared_norms`, cached: a weight and a bias often need those of one output gradient."""
        return self._last_squares.of(x_Bn, lambda: squared_norms(x_Bn))

    def take(self, wanted: int) -> bool:
        """Reserve `wanted` bytes if available."""
        if wanted > self.left:
            return False
        self.left -= wanted
        return True


class Form(ABC):
    """The gradients of all examples with respect to one tensor of shape `shape`."""

    batch: int
    shape: torch.Size
    dtype: torch.dtype
    # Set by `squared_norms`: the squared error of rounded operands, and which examples have a loose bound.
    squared_error_B: Tensor | None = None
    loose_B: Tensor | None = None

    @abstractmethod
    def squared_norms(self, budget: Budget) -> Tensor:
        """Upper bounds on the squared norms, [B] in float64."""

    def tighten(self, square_B: Tensor, budget: Budget) -> None:  # noqa: B027 (most forms have nothing loose)
        """Replace loose bounds by tight ones. (Separate from `squared_norms` because it waits for the device.)"""

    @abstractmethod
    def weighted_sum(self, w_B: Tensor) -> Tensor:
        """sum_i w_i gradient_i."""

    @abstractmethod
    def instantiate(self, examples: slice) -> Tensor:
        """The gradients of some examples, [b, *shape]."""

    @abstractmethod
    def mute(self, muted_B: Tensor) -> None:
        """Set the gradients of these examples to 0: a weight of 0 does not cancel an Inf or a NaN."""

    def mass(self, example: int) -> float:
        """The norm of the terms that sum to this example's gradient: rounding errors scale with it."""
        return 0.0


def measured(form: Form, budget: Budget, rare: Rare | None = None) -> Tensor:
    """A form's squared norms, with all loose bounds tightened."""
    square_B = form.squared_norms(budget)
    if form.loose_B is not None and (rare or Rare()).any(form.loose_B):
        form.tighten(square_B, budget)
    return square_B


def roundoff(dtype: torch.dtype) -> float:
    """The unit roundoff u: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def at_least_float32(x: Tensor) -> Tensor:
    """Promote to float32 or better, for sums."""
    if x.is_complex():
        return x if x.dtype != torch.complex32 else x.to(torch.complex64)
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def as_real(x_Bn: Tensor) -> Tensor:
    """Rows of complex numbers as rows of twice as many real numbers; real rows unchanged."""
    return torch.view_as_real(x_Bn.resolve_conj()).flatten(1) if x_Bn.is_complex() else x_Bn


def squared_norms(x_Bn: Tensor) -> Tensor:
    """An upper bound on the squared norm of each row, in float64.

    The sum of a block of k squares, in any order, has a relative error of at most (k + 2) u, and its root half of that.
    A square below the smallest number is lost: at most sqrt(k tiny) per block.
    """
    x_Bn = as_real(x_Bn)
    B, n = x_Bn.shape
    if (x_Bn.is_cuda or _KERNELS_ON_CPU) and kernels.usable(x_Bn):
        return row_squares(x_Bn)
    if n == 0:
        return torch.zeros(B, dtype=torch.float64, device=x_Bn.device)
    x_Bn = at_least_float32(x_Bn)
    whole = n // _BLOCK * _BLOCK
    parts: list[Tensor] = []
    if whole:
        blocks = torch.linalg.vector_norm(x_Bn[:, :whole].reshape(B, -1, _BLOCK), dim=2)
        parts.append(torch.linalg.vector_norm(blocks.double(), dim=1).square())
    if whole < n:
        parts.append(torch.linalg.vector_norm(x_Bn[:, whole:], dim=1).double().square())
    total = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    length = min(n, _BLOCK)
    lost = torch.finfo(x_Bn.dtype).tiny * n
    return total.mul_(1 + 2 * (length + 2) * roundoff(x_Bn.dtype)).add_(lost)


def lengths(x_BTm: Tensor) -> Tensor:
    """An upper bound on the norm of each position's row: [B, T] in float64."""
    B, T, m = x_BTm.shape
    return squared_norms(x_BTm.reshape(B * T, m)).view(B, T).sqrt()


def masses(left_BTm: Tensor, right_BTn: Tensor) -> Tensor:
    """An upper bound on |left_t| |right_t|: [B, T] in float64."""
    return lengths(left_BTm) * lengths(right_BTn)


def bytes_of(batch: int, shape: torch.Size, dtype: torch.dtype) -> int:
    """The size of `batch` gradients in bytes."""
    return batch * shape.numel() * dtype.itemsize


def slices(batch: int, step: int) -> list[slice]:
    """The examples in pieces of `step`."""
    return [slice(i, min(i + step, batch)) for i in range(0, batch, step)]


def chunks(batch: int, bytes_each: int, most_bytes: int | None = None) -> list[slice]:
    """The examples in pieces of at most so many bytes (default CHUNK_BYTES), or of one example."""
    most_bytes = CHUNK_BYTES if most_bytes is None else most_bytes
    return slices(batch, max(1, min(batch, most_bytes // max(1, bytes_each))))


def zeroed(x: Tensor, muted_B: Tensor) -> Tensor:
    """Set the rows of these examples to zero."""
    return x.masked_fill(along_first(muted_B, x), 0)


def along_first(per_example_B: Tensor, t: Tensor) -> Tensor:
    """One number per example, in a shape that broadcasts to a tensor with the examples along its first axis."""
    return per_example_B.view(-1, *[1] * (t.dim() - 1))


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
        self._is_ieee = False  # whether the caller computes sums in IEEE products

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
        self._is_ieee = budget.arithmetic is IEEE
        if self._kept is not None:
            if len(self._kept) == 1:
                return budget.squared_norms(_flat(self._kept[0]))
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
        """Measured gradients are summed without rounding operands, in IEEE products."""
        if self._is_ieee:
            return self._weighted_sum(w_B)
        with ieee_arithmetic():
            return self._weighted_sum(w_B)

    def _weighted_sum(self, w_B: Tensor) -> Tensor:
        if self._kept is not None and len(self._kept) == 1:
            return _combine(w_B, self._kept[0])
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
    reuses = left_bTm.device.type == "cpu" and not is_tracing()
    out = _blocks.take(size, left_bTm.dtype) if reuses else None
    return torch.bmm(left_bTm.mT, right_bTn, out=out)


def _flat(gradients: Tensor) -> Tensor:
    return gradients.reshape(len(gradients), -1)


def _combine(w_B: Tensor, gradients: Tensor) -> Tensor:
    """sum_i w_i gradient_i."""
    gradients = at_least_float32(gradients)
    flat = as_real(_flat(gradients))
    total = w_B.to(flat.dtype) @ flat
    if gradients.is_complex():
        total = torch.view_as_complex(total.view(-1, 2))
    return total.view(gradients.shape[1:])
