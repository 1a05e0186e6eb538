"""The three forms that a per-example gradient can take, and what can be done with each.

    Outer    sum_t left_t right_t^T, never written out unless that is cheaper (linear layers)
    Rows     a few rows of a table (embeddings)
    Written  a tensor for each example (biases, norms, convolutions, anything else)

A rule turns one operation into forms; norms, weighted sums and instantiation are written once, here.

Norms are *upper bounds in the arithmetic used*, squared and in float64. Three things could make a
computed norm too small: rounding in the sum of squares (`squared_norms` bounds it), cancelling positions
in a Gram product, and cancelling positions in the product that later forms the weighted sum, whose
rounding error grows with the *mass* M = sum_t |left_t| |right_t| and not with the norm. Where the gradient
is not written out, the bound is therefore n + c u M, with u the unit roundoff of the product; an example
whose bound would be loose by more than 1e-5 is written out instead, in float64.

Where products run in less than IEEE arithmetic (precision.py), rounding of their operands moves an example's
part of the sum by up to e M more. That is no part of the norm: it stands beside it, in `squared_error_B`.

Legend: B examples, T positions, m and n the sides of a weight; w_B one weight an example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from clipwise import kernels
from clipwise.gradients.blocks import Blocks
from clipwise.gradients.precision import IEEE, TF32, Arithmetic, ieee_arithmetic
from clipwise.kernels.gram import LastProducts, gram_norms, is_same
from clipwise.kernels.squares import row_squares

CHUNK_BYTES = 64 * 2**20  # at most this much of per-example gradients is written out at a time
_PIECE_BYTES = 8 * 2**20
_LONG_ROW = 4096
_POSITIONS, _FEATURES = 48, 2048  # of a block of inner products, and of the copies that it is made of
_BLOCK = 256  # squares are summed in blocks of this length in the tensor's own dtype, then in float64
PRODUCT_ERROR = 4.0  # c in the bound n + c u M
LOOSE = 1e-5  # a relative width of the bound that is too much
NEGLIGIBLE = 1e-12  # a norm below which no bound worth using clips, however loose the norm's own bound

_blocks = Blocks(most_bytes=640 * 2**20)  # what is kept (examples.py), and pieces that are not


class Budget:
    """Bytes that per-example gradients may occupy from the norms until the weighted sum, and its arithmetic."""

    def __init__(self, total_bytes: int, arithmetic: Arithmetic = IEEE) -> None:
        self.left = total_bytes
        self.arithmetic = arithmetic
        self.last_products = LastProducts()
        self.last_scaled = LastScaled()

    def take(self, wanted: int) -> bool:
        """Reserve `wanted` bytes if they are there."""
        if wanted > self.left:
            return False
        self.left -= wanted
        return True


class LastScaled:
    """The operand scaled last: several layers in a row often take the same input, and all have the same weights."""

    def __init__(self) -> None:
        self._of: tuple[Tensor, Tensor, torch.dtype] | None = None
        self._scaled: Tensor | None = None

    def of(self, x_BTm: Tensor, w_B: Tensor, dtype: torch.dtype) -> Tensor:
        """w_i times the rows of example i."""
        last, scaled = self._of, self._scaled
        if last and scaled is not None and is_same(last[0], x_BTm) and last[1] is w_B and last[2] == dtype:
            return scaled
        scaled = (x_BTm * w_B.to(torch.promote_types(x_BTm.dtype, torch.float32))[:, None, None]).to(dtype)
        self._of, self._scaled = (x_BTm, w_B, dtype), scaled
        return scaled


def roundoff(dtype: torch.dtype) -> float:
    """The unit roundoff u: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def at_least_float32(x: Tensor) -> Tensor:
    """Sums run in float32 or better."""
    if x.is_complex():
        return x if x.dtype != torch.complex32 else x.to(torch.complex64)
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def as_real(x_Bn: Tensor) -> Tensor:
    """Rows of complex numbers as rows of twice as many real ones, of the same length; real rows as they are."""
    return torch.view_as_real(x_Bn.resolve_conj()).flatten(1) if x_Bn.is_complex() else x_Bn


def squared_norms(x_Bn: Tensor) -> Tensor:
    """An upper bound on the squared norm of each row, in float64.

    A block of k squares is summed, in any order, with relative error at most (k + 2) u, which is half of
    that for its root. A square below the smallest number is lost: at most sqrt(k tiny) a block.
    """
    x_Bn = as_real(x_Bn)
    B, n = x_Bn.shape
    if kernels.usable(x_Bn):
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


def _bytes(batch: int, shape: torch.Size, dtype: torch.dtype) -> int:
    return batch * shape.numel() * dtype.itemsize


def chunks(batch: int, bytes_each: int, most_bytes: int = CHUNK_BYTES) -> list[slice]:
    """The examples in pieces of so many bytes at most, or of one."""
    step = max(1, min(batch, most_bytes // max(1, bytes_each)))
    return [slice(i, min(i + step, batch)) for i in range(0, batch, step)]


class Form(ABC):
    """The gradients of all examples with respect to one tensor of shape `shape`."""

    batch: int
    shape: torch.Size
    dtype: torch.dtype
    # Set by `squared_norms`: what the operands' rounding can add to the norm, squared, and whose bound is loose.
    squared_error_B: Tensor | None = None
    loose_B: Tensor | None = None

    @abstractmethod
    def squared_norms(self, budget: Budget) -> Tensor:
        """Upper bounds on the squared norms, [B] in float64."""

    def tighten(self, square_B: Tensor, budget: Budget) -> None:  # noqa: B027 (most forms have nothing loose)
        """Put better bounds in the place of loose ones. (Apart from the rest: it waits for the device.)"""

    @abstractmethod
    def weighted_sum(self, w_B: Tensor) -> Tensor:
        """sum_i w_i gradient_i."""

    @abstractmethod
    def instantiate(self, examples: slice) -> Tensor:
        """The gradients of some examples, [b, *shape]."""

    @abstractmethod
    def mute(self, muted_B: Tensor) -> None:
        """Make the gradients of these examples 0: a weight of 0 does not cancel an Inf or a NaN."""

    def mass(self, example: int) -> float:
        """How large the terms are whose sum is this example's gradient: rounding errors scale with it."""
        return 0.0


def measured(form: Form, budget: Budget) -> Tensor:
    """A form's squared norms, with no bound left loose."""
    square_B = form.squared_norms(budget)
    form.tighten(square_B, budget)
    return square_B


class Written(Form):
    """A gradient for each example, made piece by piece, and kept from the norms to the sum if memory allows."""

    def __init__(
        self,
        batch: int,
        shape: torch.Size,
        dtype: torch.dtype,
        make: Callable[[slice], Tensor],
        piece: int | None = None,
    ) -> None:
        """`make` gives the gradients of some examples; `piece` is how many of them it makes fastest at once."""
        self.batch, self.shape, self.dtype = batch, shape, dtype
        self._make, self._piece = make, piece or max(1, batch)
        self._kept: list[Tensor] | None = None
        self._muted_B: Tensor | None = None

    @classmethod
    def of(cls, ready: Tensor) -> Written:
        """From gradients that are at hand, [B, *shape]."""
        written = cls(len(ready), ready.shape[1:], ready.dtype, lambda examples: ready[examples])
        written._kept = [ready]
        return written

    @classmethod
    def zeros(cls, batch: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Written:
        """No example has any gradient."""
        return cls.of(torch.zeros((), dtype=dtype, device=device).expand(batch, *shape))

    @property
    def is_kept(self) -> bool:
        """Whether what was measured is what will be summed."""
        return self._kept is not None

    def squared_norms(self, budget: Budget) -> Tensor:
        if self._kept is not None:
            return torch.cat([squared_norms(_flat(piece)) for piece in self._kept])
        keep = budget.take(_bytes(self.batch, self.shape, self.dtype))
        kept, found = [], []
        for c in self._pieces() if keep else self._chunks():
            made = self._make(c)
            found.append(squared_norms(_flat(made)))
            if keep:
                kept.append(made)
        if keep:
            self._kept, self._make = kept, _made_before  # what they were made of can go
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
        return made if self._muted_B is None else _zero(made, self._muted_B[examples])

    def mute(self, muted_B: Tensor) -> None:
        self._muted_B = muted_B
        if self._kept is not None:
            pairs = zip(self._kept, self._split(muted_B), strict=True)
            self._kept = [_zero(piece, muted) for piece, muted in pairs]

    def _split(self, per_example_B: Tensor) -> list[Tensor]:
        """As the kept pieces are."""
        assert self._kept is not None
        return list(torch.split(per_example_B, [len(piece) for piece in self._kept]))

    def _pieces(self) -> list[slice]:
        return [slice(i, min(i + self._piece, self.batch)) for i in range(0, self.batch, self._piece)]

    def _chunks(self) -> list[slice]:
        whole = chunks(self.batch, _bytes(1, self.shape, self.dtype))
        return whole if whole[0].stop <= self._piece else self._pieces()


def real(form: Form) -> Form:
    """The real part of complex gradients, of a form that writes them out."""
    if not form.dtype.is_complex:
        return form
    return Written(
        form.batch, form.shape, form.dtype.to_real(), lambda examples: form.instantiate(examples).real
    )


class Permuted(Form):
    """Gradients that are written out with their axes in another order."""

    def __init__(self, written: Written, order: Sequence[int]) -> None:
        """`order` gives, for each axis of this form's shape, the axis of what is written."""
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
    raise AssertionError("these gradients are kept, and not made again")


def gram_is_cheaper(T: int, m: int, n: int) -> bool:
    """Whether inner products of T positions cost less than gradients of m by n that are written and read again.

    The inner products are T^2 (m + n) in float64; a gradient is m n numbers, each about six of those by its
    ways through memory, and its own T m n products take the place of the sum's. (A rough constant: it decides how
    long a step takes, and no result.)
    """
    return T * T * (m + n) < 6 * m * n and 2 * T * (m + n) < m * n


def gram_pays_on_cuda(T: int, m: int, n: int, arithmetic: Arithmetic = TF32) -> bool:
    """The same on CUDA: products run on tensor cores, and a gradient passes through memory three times.

    2 T^2 (m + n) / 200e12 seconds against 12 m n / 4e12, or 2 T^2 (m + n) / 40e12 without TF32.
    """
    return T * T * (m + n) < (300 if arithmetic is TF32 else 60) * m * n


class Outer(Form):
    """gradient_i = sum_t left_it right_it^T, of shape [m, n] or of one with as many entries."""

    def __init__(
        self,
        left_BTm: Tensor,
        right_BTn: Tensor,
        shape: torch.Size | None = None,
        *,
        upright: bool = False,
    ) -> None:
        """`upright`: the weighted sum is wanted as it is, and not transposed as a linear layer's weight is."""
        dtype = torch.promote_types(left_BTm.dtype, right_BTn.dtype)
        # A product of bf16 or fp16 rows is summed in float32: its rounding must not eat the bound.
        self.dtype = dtype if dtype in (torch.float32, torch.float64) else torch.float32
        self.left, self.right = left_BTm, right_BTn
        if torch.float64 in (left_BTm.dtype, right_BTn.dtype) or left_BTm.device.type == "cpu":
            self.left, self.right = left_BTm.to(self.dtype), right_BTn.to(self.dtype)
        self.batch = len(left_BTm)
        self.shape = shape or torch.Size((left_BTm.shape[-1], right_BTn.shape[-1]))
        self._upright = upright
        self._arithmetic = IEEE
        self._last_scaled = LastScaled()
        self._aligned: tuple[Tensor, ...] | None = None
        self._written: Written | None = None
        self._exact: dict[int, Tensor | None] = {}  # examples summed by themselves; None is made again then

    def squared_norms(self, budget: Budget) -> Tensor:
        B, T, _ = self.left.shape
        self._arithmetic, self._last_scaled = budget.arithmetic, budget.last_scaled
        product_error = PRODUCT_ERROR * roundoff(self.dtype)
        if T == 1:
            mass_B = (lengths(self.left) * lengths(self.right)).flatten()
            norm_B = mass_B
        elif self._gram_pays(budget.arithmetic):
            square_B, mass_B = self.gram_squares(budget)
            norm_B = square_B.sqrt()
        else:
            multiply = _multiplier(self.left, self.right, self.shape)
            written = Written(B, self.shape, self.dtype, multiply, _piece(self.shape, self.left))
            square_B = written.squared_norms(budget)
            if written.is_kept:
                self._written = written  # what gets summed is what was measured: no more to bound
                self.left, self.right = self.left.new_empty(0), self.right.new_empty(0)
                return square_B
            norm_B = square_B.sqrt()
            mass_B = (lengths(self.left) * lengths(self.right)).sum(1)
        bound_B = (norm_B + product_error * mass_B).square()
        if budget.arithmetic is not IEEE:
            self.squared_error_B = (budget.arithmetic.operand_error * mass_B).square()
        elif T > 1:
            self.loose_B = (product_error * mass_B > LOOSE * norm_B) & torch.isfinite(bound_B)
            self.loose_B &= bound_B > NEGLIGIBLE**2
        return bound_B

    def tighten(self, square_B: Tensor, budget: Budget) -> None:
        if self.loose_B is None:
            return
        for i in self.loose_B.nonzero().flatten().tolist():
            gradient = self._in_float64(i)
            square_B[i] = squared_norms(gradient.reshape(1, -1))[0]
            self._exact[i] = gradient if budget.take(_bytes(1, self.shape, torch.float64)) else None

    def _gram_pays(self, arithmetic: Arithmetic) -> bool:
        _, T, m = self.left.shape
        n = self.right.shape[-1]
        if kernels.usable(self.left) and self.dtype == torch.float32:
            return gram_pays_on_cuda(T, m, n, arithmetic)
        return gram_is_cheaper(T, m, n)

    def _in_float64(self, example: int) -> Tensor:
        return self.left[example].double().T @ self.right[example].double()

    def gram_squares(self, budget: Budget) -> tuple[Tensor, Tensor]:
        """|sum_t l_t r_t^T|^2 = sum_{t,s} <l_t, l_s> <r_t, r_s> and the mass; both are upper bounds.

        In float64, with inner products of length m and n and T^2 terms, the rounding error is at most
        (m + n + T^2 + 4) u64 M^2, and is added.
        """
        if kernels.usable(self.left) and self.dtype == torch.float32:
            return gram_norms(*self._padded(), budget.arithmetic.name, budget.last_products)
        B, T, m = self.left.shape
        n = self.right.shape[-1]
        mass_B = (lengths(self.left) * lengths(self.right)).sum(1)
        gram_B = torch.empty_like(mass_B)
        together = _PIECE_BYTES if self.left.device.type == "cpu" else CHUNK_BYTES
        for c in chunks(B, 8 * T * (min(m + n, _FEATURES) + 2 * T), together):
            left, right = inner_products(self.left[c]), inner_products(self.right[c])
            terms = [(1 + (i > j)) * torch.linalg.vecdot(left[i, j], right[i, j]) for i, j in left]
            gram_B[c] = torch.stack(terms).sum(0)
        return gram_B.clamp_min(0) + (m + n + T**2 + 4) * roundoff(torch.float64) * mass_B.square(), mass_B

    def weighted_sum(self, w_B: Tensor) -> Tensor:
        if self._written is not None:
            return self._written.weighted_sum(w_B)
        product_w_B = w_B
        if self._exact:
            product_w_B = w_B.clone()
            product_w_B[list(self._exact)] = 0
        left, right = self._scaled(product_w_B)
        m, n = self.left.shape[-1], self.right.shape[-1]
        if self._upright:
            total = _product(left.flatten(0, 1).T, right.flatten(0, 1), self.dtype)[:m, :n]
        else:  # a linear layer's weight is [outputs, inputs], and is then contiguous
            total = _product(right.flatten(0, 1).T, left.flatten(0, 1), self.dtype)[:n, :m].T
        for i, kept in self._exact.items():
            total += (w_B[i] * (self._in_float64(i) if kept is None else kept)).to(self.dtype)
        return total.reshape(self.shape)

    def _padded(self) -> tuple[Tensor, Tensor]:
        """Both operands, with zeros behind long rows of a length that makes products slow (a vocabulary's)."""
        if self._aligned is None:
            self._aligned = tuple(_aligned(x) for x in (self.left, self.right))
        return self._aligned[0], self._aligned[1]

    def _scaled(self, w_B: Tensor) -> tuple[Tensor, Tensor]:
        """Both operands, the smaller one scaled. Operands in bfloat16 stay so where that error is stated."""
        left, right = self._padded()
        short = {left.dtype, right.dtype} == {torch.bfloat16} and self._arithmetic is not IEEE
        dtype = torch.bfloat16 if short else self.dtype
        if left.shape[-1] <= right.shape[-1]:
            return self._last_scaled.of(left, w_B, dtype), right.to(dtype)
        return left.to(dtype), self._last_scaled.of(right, w_B, dtype)

    def instantiate(self, examples: slice) -> Tensor:
        if self._written is not None:
            return self._written.instantiate(examples)
        return _multiplier(self.left, self.right, self.shape)(examples)

    def mass(self, example: int) -> float:
        left, right = (torch.linalg.vector_norm(x[example].double(), dim=1) for x in (self.left, self.right))
        return float(left @ right)

    def mute(self, muted_B: Tensor) -> None:
        if self._written is not None:
            self._written.mute(muted_B)
            return
        self.left, self.right, self._aligned = _zero(self.left, muted_B), _zero(self.right, muted_B), None
        for i in muted_B.nonzero().flatten().tolist():
            self._exact.pop(i, None)


def _multiplier(left: Tensor, right: Tensor, shape: torch.Size) -> Callable[[slice], Tensor]:
    """Writes out the gradients of some examples. (No method of Outer: the two would keep each other alive.)"""

    dtype = at_least_float32(torch.empty(0, dtype=torch.promote_types(left.dtype, right.dtype))).dtype

    def multiply(examples: slice) -> Tensor:
        product = written_products(left[examples].to(dtype), right[examples].to(dtype))
        return product.view(len(product), *shape)

    return multiply


def written_products(left_bTm: Tensor, right_bTn: Tensor) -> Tensor:
    """sum_t left_t right_t^T of each example, [b, m, n]; on a CPU in memory that is used again."""
    size = torch.Size((len(left_bTm), left_bTm.shape[2], right_bTn.shape[2]))
    room = _blocks.take(size, left_bTm.dtype) if left_bTm.device.type == "cpu" else None
    return torch.bmm(left_bTm.mT, right_bTn, out=room)


def _aligned(x_BTm: Tensor) -> Tensor:
    """On CUDA, rows that begin at multiples of 16 bytes and are a multiple of 64 numbers long."""
    m = x_BTm.shape[-1]
    if x_BTm.device.type != "cuda" or m < _LONG_ROW or m * x_BTm.element_size() % 16 == 0:
        return x_BTm
    return torch.nn.functional.pad(x_BTm, (0, -m % 64))


def _product(a_mk: Tensor, b_kn: Tensor, dtype: torch.dtype) -> Tensor:
    """a b, summed in `dtype`."""
    return a_mk @ b_kn if a_mk.dtype == dtype else torch.mm(a_mk, b_kn, out_dtype=dtype)


def inner_products(x_bTm: Tensor) -> dict[tuple[int, int], Tensor]:
    """<x_t, x_s> in float64, for every two positions of an example: a flat block by the blocks (i, j) of t and s.

    They are symmetric, so that j <= i is enough where there are many positions. Features are taken a few at a
    time, or their copies in float64 would fall out of a CPU's caches.
    """
    T, m = x_bTm.shape[1:]
    step = _POSITIONS if T >= 2 * _POSITIONS else max(1, T)
    found: dict[tuple[int, int], Tensor] = {}
    for first in range(0, max(1, m), _FEATURES):
        parts = torch.split(x_bTm[..., first : first + _FEATURES].double(), step, dim=1)
        for i, x_btk in enumerate(parts):
            for j, y_bsk in enumerate(parts[: i + 1]):
                if first:
                    found[i, j].baddbmm_(x_btk, y_bsk.mT)
                else:
                    found[i, j] = x_btk @ y_bsk.mT
    return {pair: block_bts.flatten(1) for pair, block_bts in found.items()}


def lengths(x_BTm: Tensor) -> Tensor:
    """An upper bound on the length of each position's row: [B, T] in float64."""
    B, T, m = x_BTm.shape
    return squared_norms(x_BTm.reshape(B * T, m)).view(B, T).sqrt()


def _piece(shape: torch.Size, like: Tensor) -> int | None:
    """How many gradients to write out at once on a CPU: larger blocks are mapped and unmapped every time."""
    return max(1, _PIECE_BYTES // _bytes(1, shape, like.dtype)) if like.device.type == "cpu" else None


class Rows(Form):
    """Entry k adds the row g_k to row id_k of example i_k's table of V rows."""

    def __init__(
        self,
        example_K: Tensor,
        ids_K: Tensor,
        g_Kn: Tensor,
        batch: int,
        table: torch.Size,
        each: int | None = None,
    ) -> None:
        """`table` is the parameter's shape, of V * n entries however they are arranged.

        `each` is how many entries every example has, where all have as many.
        """
        self.example, self.ids, self.g, self.each = example_K, ids_K, g_Kn, each
        self.batch, self.shape, self.dtype = batch, table, g_Kn.dtype
        self.V = table.numel() // g_Kn.shape[1]
        self._merged: tuple[Tensor, Tensor, Tensor] | None = None

    def merged(self) -> tuple[Tensor, Tensor, Tensor]:
        """Repeated ids of one example added up first: (example, id, row) of each distinct pair, in order.

        As many entries as before: what is left over at the end are rows of zeros (of example 0).

        Norm and weighted sum both start from these rows, so what is summed is what was measured.
        """
        if self._merged is None:
            # (No `unique`: its result has a size that the host would have to wait for.)
            keys_K, order_K = torch.sort(self.example * self.V + self.ids)
            begins_K = torch.ones_like(keys_K)
            begins_K[1:] = keys_K[1:] != keys_K[:-1]
            group_K = begins_K.cumsum(0) - 1
            where_K = torch.empty_like(group_K).scatter_(0, order_K, group_K)
            rows = torch.zeros_like(self.g).index_add_(0, where_K, self.g)
            distinct = torch.zeros_like(keys_K).scatter_(0, group_K, keys_K)
            self._merged = (distinct // self.V, distinct % self.V, rows)
        return self._merged

    def by_example(self) -> tuple[Tensor, Tensor]:
        """Ids and rows as [B, U] and [B, U, n], with rows of zeros where an example has fewer than U entries."""
        order_K = torch.argsort(self.example, stable=True)
        if self.each is not None:
            order_BU = order_K.view(self.batch, self.each)
            return self.ids[order_BU], self.g[order_BU]
        count_B = torch.bincount(self.example, minlength=self.batch)
        example_K = self.example[order_K]
        place_K = torch.arange(len(order_K), device=order_K.device) - (count_B.cumsum(0) - count_B)[example_K]
        ids_BU = self.ids.new_zeros((self.batch, max(1, int(count_B.max()))))
        rows_BUn = self.g.new_zeros((*ids_BU.shape, self.g.shape[1]))
        ids_BU[example_K, place_K], rows_BUn[example_K, place_K] = self.ids[order_K], self.g[order_K]
        return ids_BU, rows_BUn

    def squared_norms(self, budget: Budget) -> Tensor:
        example, _, rows = self.merged()
        total = torch.zeros(self.batch, dtype=torch.float64, device=rows.device)
        return total.index_add_(0, example, squared_norms(rows))

    def weighted_sum(self, w_B: Tensor) -> Tensor:
        table = torch.zeros(self.V, self.g.shape[1], dtype=self.dtype, device=self.g.device)
        return self.add_weighted_sum(table, w_B).view(self.shape)

    def add_weighted_sum(self, table_Vn: Tensor, w_B: Tensor) -> Tensor:
        """The weighted sum, added to a table."""
        example, ids, rows = self.merged()
        return table_Vn.index_add_(0, ids, (rows * w_B.to(self.dtype)[example, None]).to(table_Vn.dtype))

    def instantiate(self, examples: slice) -> Tensor:
        first, last, _ = examples.indices(self.batch)
        example, ids, g = self.example, self.ids, self.g
        if last - first < self.batch:  # (to pick entries makes the host wait for a GPU)
            inside = (example >= first) & (example < last)
            example, ids, g = example[inside] - first, ids[inside], g[inside]
        tables = torch.zeros(last - first, self.V, g.shape[1], dtype=self.dtype, device=g.device)
        return tables.index_put_((example, ids), g, accumulate=True).view(last - first, *self.shape)

    def mass(self, example: int) -> float:
        return float(torch.linalg.vector_norm(self.g[self.example == example].double(), dim=1).sum())

    def mute(self, muted_B: Tensor) -> None:
        self.g = self.g.masked_fill(muted_B[self.example, None], 0)
        self._merged = None


def _flat(gradients: Tensor) -> Tensor:
    return gradients.reshape(len(gradients), -1)


@ieee_arithmetic()
def _combine(w_B: Tensor, gradients: Tensor) -> Tensor:
    """sum_i w_i gradient_i; what was measured is summed as it is, so these products are never rounded."""
    gradients = at_least_float32(gradients)
    flat = as_real(_flat(gradients))
    total = w_B.to(flat.dtype) @ flat
    if gradients.is_complex():
        total = torch.view_as_complex(total.view(-1, 2))
    return total.view(gradients.shape[1:])


def _zero(x: Tensor, muted_B: Tensor) -> Tensor:
    return x.masked_fill(muted_B.view(-1, *[1] * (x.dim() - 1)), 0)
