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

Legend: B examples, T positions, m and n the sides of a weight; w_B one weight an example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

CHUNK_BYTES = 64 * 2**20  # at most this much of per-example gradients is written out at a time
_PIECE_BYTES = 8 * 2**20
_BLOCK = 256  # squares are summed in blocks of this length in the tensor's own dtype, then in float64
PRODUCT_ERROR = 4.0  # c in the bound n + c u M
LOOSE = 1e-5  # a relative width of the bound that is too much
NEGLIGIBLE = 1e-12  # a norm below which no bound worth using clips, however loose the norm's own bound


class Budget:
    """Bytes that per-example gradients may occupy from the norms until the weighted sum."""

    def __init__(self, total_bytes: int) -> None:
        self.left = total_bytes

    def take(self, wanted: int) -> bool:
        """Reserve `wanted` bytes if they are there."""
        if wanted > self.left:
            return False
        self.left -= wanted
        return True


def roundoff(dtype: torch.dtype) -> float:
    """The unit roundoff u: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def at_least_float32(x: Tensor) -> Tensor:
    """Sums run in float32 or better."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def squared_norms(x_Bn: Tensor) -> Tensor:
    """An upper bound on the squared norm of each row, in float64.

    A block of k squares is summed, in any order, with relative error at most (k + 2) u, which is half of
    that for its root. A square below the smallest number is lost: at most sqrt(k tiny) a block.
    """
    B, n = x_Bn.shape
    if n == 0:
        return torch.zeros(B, dtype=torch.float64, device=x_Bn.device)
    x_Bn = at_least_float32(x_Bn)
    whole = n // _BLOCK * _BLOCK
    total = torch.zeros(B, dtype=torch.float64, device=x_Bn.device)
    if whole:
        blocks = torch.linalg.vector_norm(x_Bn[:, :whole].reshape(B, -1, _BLOCK), dim=2)
        total += torch.linalg.vector_norm(blocks.double(), dim=1).square()
    if whole < n:
        total += torch.linalg.vector_norm(x_Bn[:, whole:], dim=1).double().square()
    length = min(n, _BLOCK)
    lost = torch.finfo(x_Bn.dtype).tiny * n
    return total * (1 + 2 * (length + 2) * roundoff(x_Bn.dtype)) + lost


def _bytes(batch: int, shape: torch.Size, dtype: torch.dtype) -> int:
    return batch * shape.numel() * dtype.itemsize


def chunks(batch: int, bytes_each: int) -> list[slice]:
    """The examples in pieces of CHUNK_BYTES at most, or of one."""
    step = max(1, min(batch, CHUNK_BYTES // max(1, bytes_each)))
    return [slice(i, min(i + step, batch)) for i in range(0, batch, step)]


class Form(ABC):
    """The gradients of all examples with respect to one tensor of shape `shape`."""

    batch: int
    shape: torch.Size
    dtype: torch.dtype

    @abstractmethod
    def squared_norms(self, budget: Budget) -> Tensor:
        """Upper bounds on the squared norms, [B] in float64."""

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
    def zeros(cls, batch: int, shape: torch.Size, device: torch.device) -> Written:
        """No example has any gradient."""
        return cls.of(torch.zeros((), device=device).expand(batch, *shape))

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
        self._kept = kept if keep else None
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
        if self._kept is not None and len(self._kept) == 1:
            return self._kept[0][examples]
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


def gram_is_cheaper(T: int, m: int, n: int) -> bool:
    """Whether inner products of T positions cost less than gradients of m by n that are written and read again.

    The inner products are T^2 (m + n) in float64; a gradient is m n numbers, each about six of those by its
    ways through memory, and its own T m n products take the place of the sum's. (A rough constant: it decides how
    long a step takes, and no result.)
    """
    return T * T * (m + n) < 6 * m * n and 2 * T * (m + n) < m * n


class Outer(Form):
    """gradient_i = sum_t left_it right_it^T, of shape [m, n] or of one with as many entries."""

    def __init__(self, left_BTm: Tensor, right_BTn: Tensor, shape: torch.Size | None = None) -> None:
        dtype = torch.promote_types(left_BTm.dtype, right_BTn.dtype)
        # A product of bf16 or fp16 rows is summed in float32: its rounding must not eat the bound.
        self.dtype = dtype if dtype in (torch.float32, torch.float64) else torch.float32
        self.left, self.right = left_BTm.to(self.dtype), right_BTn.to(self.dtype)
        self.batch = len(left_BTm)
        self.shape = shape or torch.Size((left_BTm.shape[-1], right_BTn.shape[-1]))
        self._written: Written | None = None
        self._exact: dict[int, Tensor | None] = {}  # examples summed by themselves; None is made again then

    def squared_norms(self, budget: Budget) -> Tensor:
        B, T, m = self.left.shape
        n = self.right.shape[-1]
        product_error = PRODUCT_ERROR * roundoff(self.dtype)
        left_BT = squared_norms(self.left.reshape(B * T, m)).view(B, T).sqrt()
        right_BT = squared_norms(self.right.reshape(B * T, n)).view(B, T).sqrt()
        mass_B = (left_BT * right_BT).sum(1)
        if T == 1:
            return (mass_B * (1 + product_error)).square()
        if gram_is_cheaper(T, m, n):
            square_B = self._gram_squares(mass_B)
        else:
            multiply = _multiplier(self.left, self.right, self.shape)
            written = Written(B, self.shape, self.dtype, multiply, _piece(self.shape, self.left))
            square_B = written.squared_norms(budget)
            if written.is_kept:
                self._written = written  # what gets summed is what was measured: no more to bound
                return square_B
        norm_B, slack_B = square_B.sqrt(), product_error * mass_B
        bound_B = (norm_B + slack_B).square()
        loose_B = (slack_B > LOOSE * norm_B) & torch.isfinite(bound_B) & (bound_B > NEGLIGIBLE**2)
        for i in loose_B.nonzero().flatten().tolist():
            gradient = self._in_float64(i)
            bound_B[i] = squared_norms(gradient.reshape(1, -1))[0]
            self._exact[i] = gradient if budget.take(_bytes(1, self.shape, torch.float64)) else None
        return bound_B

    def _in_float64(self, example: int) -> Tensor:
        return self.left[example].double().T @ self.right[example].double()

    def _gram_squares(self, mass_B: Tensor) -> Tensor:
        """|sum_t l_t r_t^T|^2 = sum_{t,s} <l_t, l_s> <r_t, r_s>, in float64.

        With inner products of length m and n and T^2 terms the rounding error is at most
        (m + n + T^2 + 4) u64 M^2, and is added.
        """
        B, T, m = self.left.shape
        n = self.right.shape[-1]
        gram_B = torch.empty_like(mass_B)
        for c in chunks(B, 8 * T * (m + n + 2 * T)):
            left, right = self.left[c].double(), self.right[c].double()
            gram_B[c] = torch.einsum("bts,bts->b", left @ left.mT, right @ right.mT)
        return gram_B.clamp_min(0) + (m + n + T**2 + 4) * roundoff(torch.float64) * mass_B.square()

    def weighted_sum(self, w_B: Tensor) -> Tensor:
        if self._written is not None:
            return self._written.weighted_sum(w_B)
        product_w_B = w_B.to(self.dtype, copy=True)
        product_w_B[list(self._exact)] = 0
        w_B11 = product_w_B[:, None, None]
        left, right = self.left, self.right
        if left.shape[-1] <= right.shape[-1]:
            left = left * w_B11
        else:
            right = right * w_B11
        total = left.flatten(0, 1).T @ right.flatten(0, 1)
        for i, kept in self._exact.items():
            total += (w_B[i] * (self._in_float64(i) if kept is None else kept)).to(self.dtype)
        return total.view(self.shape)

    def instantiate(self, examples: slice) -> Tensor:
        return _multiplier(self.left, self.right, self.shape)(examples)

    def mass(self, example: int) -> float:
        left, right = (torch.linalg.vector_norm(x[example].double(), dim=1) for x in (self.left, self.right))
        return float(left @ right)

    def mute(self, muted_B: Tensor) -> None:
        self.left, self.right = _zero(self.left, muted_B), _zero(self.right, muted_B)
        for i in muted_B.nonzero().flatten().tolist():
            self._exact.pop(i, None)
        if self._written is not None:
            self._written.mute(muted_B)


def _multiplier(left: Tensor, right: Tensor, shape: torch.Size) -> Callable[[slice], Tensor]:
    """Writes out the gradients of some examples. (No method of Outer: the two would keep each other alive.)"""

    def multiply(examples: slice) -> Tensor:
        product = left[examples].mT @ right[examples]
        return product.view(len(product), *shape)

    return multiply


def _piece(shape: torch.Size, like: Tensor) -> int | None:
    """How many gradients to write out at once on a CPU: larger blocks are mapped and unmapped every time."""
    return max(1, _PIECE_BYTES // _bytes(1, shape, like.dtype)) if like.device.type == "cpu" else None


class Rows(Form):
    """Entry k adds the row g_k to row id_k of example i_k's table of V rows."""

    def __init__(self, example_K: Tensor, ids_K: Tensor, g_Kn: Tensor, batch: int, table: torch.Size) -> None:
        """`table` is the parameter's shape, of V * n entries however they are arranged."""
        self.example, self.ids, self.g = example_K, ids_K, g_Kn
        self.batch, self.shape, self.dtype = batch, table, g_Kn.dtype
        self.V = table.numel() // g_Kn.shape[1]
        self._merged: tuple[Tensor, Tensor, Tensor] | None = None

    def merged(self) -> tuple[Tensor, Tensor, Tensor]:
        """Repeated ids of one example added up first: (example, id, row) of each distinct pair, in order.

        Norm and weighted sum both start from these rows, so what is summed is what was measured.
        """
        if self._merged is None:
            keys = self.example * self.V + self.ids
            distinct, where = torch.unique(keys, return_inverse=True)
            rows = torch.zeros(len(distinct), self.g.shape[1], dtype=self.dtype, device=self.g.device)
            rows.index_add_(0, where, self.g)
            self._merged = (distinct // self.V, distinct % self.V, rows)
        return self._merged

    def squared_norms(self, budget: Budget) -> Tensor:
        example, _, rows = self.merged()
        total = torch.zeros(self.batch, dtype=torch.float64, device=rows.device)
        return total.index_add_(0, example, squared_norms(rows))

    def weighted_sum(self, w_B: Tensor) -> Tensor:
        example, ids, rows = self.merged()
        table = torch.zeros(self.V, rows.shape[1], dtype=self.dtype, device=rows.device)
        return table.index_add_(0, ids, rows * w_B.to(self.dtype)[example, None]).view(self.shape)

    def instantiate(self, examples: slice) -> Tensor:
        first, last, _ = examples.indices(self.batch)
        inside = (self.example >= first) & (self.example < last)
        example, ids, g = self.example[inside] - first, self.ids[inside], self.g[inside]
        tables = torch.zeros(last - first, self.V, g.shape[1], dtype=self.dtype, device=g.device)
        return tables.index_put_((example, ids), g, accumulate=True).view(last - first, *self.shape)

    def mass(self, example: int) -> float:
        return float(torch.linalg.vector_norm(self.g[self.example == example].double(), dim=1).sum())

    def mute(self, muted_B: Tensor) -> None:
        self.g = self.g.masked_fill(muted_B[self.example, None], 0)
        self._merged = None


def _flat(gradients: Tensor) -> Tensor:
    return gradients.reshape(len(gradients), -1)


def _combine(w_B: Tensor, gradients: Tensor) -> Tensor:
    flat = at_least_float32(_flat(gradients))
    return (w_B.to(flat.dtype) @ flat).view(gradients.shape[1:])


def _zero(x: Tensor, muted_B: Tensor) -> Tensor:
    return x.masked_fill(muted_B.view(-1, *[1] * (x.dim() - 1)), 0)
