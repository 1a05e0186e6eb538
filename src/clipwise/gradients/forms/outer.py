"""Product, a gradient sum_t left_t right_t^T with a bound on its norm; and Outer, the gradient of a linear layer.

Legend: B examples, T positions, m and n the sides of a weight; w_B one weight per example.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from clipwise import kernels
from clipwise.gradients.forms.base import (
    CHUNK_BYTES,
    LOOSE,
    NEGLIGIBLE,
    PRODUCT_ERROR,
    Budget,
    Form,
    Written,
    at_least_float32,
    bytes_of,
    chunks,
    masses,
    roundoff,
    squared_norms,
    written_products,
    zeroed,
)
from clipwise.gradients.precision import IEEE, TF32, Arithmetic
from clipwise.kernels.gram import Last, Precision, gram_norms
from clipwise.kernels.operators import operator
from clipwise.kernels.tracing import is_tracing

_PIECE_BYTES = 8 * 2**20
_CACHED_BYTES = 2 * 2**20
_LONG_ROW = 4096
_SLACK = {dtype: PRODUCT_ERROR * roundoff(dtype) for dtype in (torch.float32, torch.float64)}  # c u
_POSITIONS, _FEATURES = 48, 2048  # of a block of inner products, and of its float64 copies


def gram_is_cheaper(T: int, m: int, n: int) -> bool:
    """Whether inner products of T positions cost less than writing out and reading gradients of size m by n.

    The inner products are T^2 (m + n) operations in float64. A gradient has m n numbers, each worth about nine of these
    operations in memory traffic; its own T m n products replace those of the sum. (A rough constant: it affects the
    speed, and no result.)
    """
    return T * T * (m + n) < 9 * m * n and 2 * T * (m + n) < m * n


def gram_pays_on_cuda(T: int, m: int, n: int, arithmetic: Arithmetic = TF32) -> bool:
    """The same on CUDA: products use tensor cores, and a gradient passes through memory three times.

    2 T^2 (m + n) / 200e12 seconds against 12 m n / 4e12, or 2 T^2 (m + n) / 40e12 without TF32.
    """
    return T * T * (m + n) < (300 if arithmetic is TF32 else 60) * m * n


class Product(Form):
    """gradient_i = sum_t left_t right_t^T, not written out. Examples with a loose bound are summed separately."""

    keeps_exact = True  # whether a gradient written out by `tighten` may be kept for the sum

    def __init__(self) -> None:
        self._exact: dict[int, Tensor | None] = {}  # examples summed separately; None: written out again for the sum

    @abstractmethod
    def _in_float64(self, example: int) -> Tensor:
        """One example's gradient, written out."""

    def _bound(self, norm_B: Tensor, mass_B: Tensor, budget: Budget, rounded_mass_B: Tensor | None = None) -> Tensor:
        """(n + c u M)^2. Below IEEE precision, stores (e M)^2 too; M may be that of `rounded_mass_B` there."""
        slack_B = _SLACK[self.dtype] * mass_B
        bound_B = (norm_B + slack_B).square()
        if budget.arithmetic is not IEEE:
            rounded_mass_B = mass_B if rounded_mass_B is None else rounded_mass_B
            self.squared_error_B = (budget.arithmetic.operand_error * rounded_mass_B).square()
        else:
            self.loose_B = (slack_B > LOOSE * norm_B) & torch.isfinite(bound_B) & (bound_B > NEGLIGIBLE**2)
        return bound_B

    def tighten(self, square_B: Tensor, budget: Budget) -> None:
        if self.loose_B is None:
            return
        for i in self.loose_B.nonzero().flatten().tolist():
            gradient = self._in_float64(i)
            square_B[i] = squared_norms(gradient.reshape(1, -1))[0]
            keeps = self.keeps_exact and budget.take(gradient.numel() * gradient.element_size())
            self._exact[i] = gradient if keeps else None

    def _without_exact(self, w_B: Tensor) -> Tensor:
        """The weights of the examples that are summed together, 0 for the others."""
        if self._exact:
            w_B = w_B.clone()
            w_B[list(self._exact)] = 0
        return w_B

    def _add_exact(self, total: Tensor, w_B: Tensor) -> Tensor:
        for i, kept in self._exact.items():
            total += (w_B[i] * (self._in_float64(i) if kept is None else kept)).to(self.dtype)
        return total

    def mute(self, muted_B: Tensor) -> None:
        for i in [i for i in self._exact if bool(muted_B[i])]:
            del self._exact[i]


class Outer(Product):
    """gradient_i = sum_t left_it right_it^T, of shape [m, n] or any shape with as many entries."""

    def __init__(
        self,
        left_BTm: Tensor,
        right_BTn: Tensor,
        shape: torch.Size | None = None,
        *,
        upright: bool = False,
        beside: int = 0,
    ) -> None:
        """`upright`: the weighted sum is returned as is, and not transposed as for a linear layer's weight.

        `beside`: the right features of other gradients with the same left rows, which share their inner products.
        """
        super().__init__()
        self.left, self.right, self.dtype = left_BTm, right_BTn, torch.float32
        if not left_BTm.dtype is right_BTn.dtype is torch.float32:
            # A product of bf16 or fp16 rows is summed in float32, so that its rounding stays within the bound.
            dtype = torch.promote_types(left_BTm.dtype, right_BTn.dtype)
            self.dtype = dtype if dtype in (torch.float32, torch.float64) else torch.float32
            if torch.float64 in (left_BTm.dtype, right_BTn.dtype) or left_BTm.device.type == "cpu":
                self.left, self.right = left_BTm.to(self.dtype), right_BTn.to(self.dtype)
        self.batch = len(left_BTm)
        self.shape = shape or torch.Size((left_BTm.shape[-1], right_BTn.shape[-1]))
        self._upright, self._beside = upright, beside
        self._arithmetic = IEEE
        self._last_scaled: Last | None = None
        self._aligned: tuple[Tensor, ...] | None = None
        self._written: Written | None = None

    def squared_norms(self, budget: Budget) -> Tensor:
        B, T, _ = self.left.shape
        if T > 1 and budget.last_scaled is None:
            budget.last_products, budget.last_scaled = Last(), Last()
        self._arithmetic, self._last_scaled = budget.arithmetic, budget.last_scaled
        if T == 1:
            left_B = squared_norms(self.left.flatten(1)).sqrt()
            norm_B = mass_B = left_B * budget.squared_norms(self.right.flatten(1)).sqrt()
        elif self._gram_pays(budget.arithmetic):
            square_B, mass_B = self.gram_squares(budget)
            norm_B = square_B.sqrt()
        else:
            multiply = _multiplier(self.left, self.right, self.shape)
            written = Written(B, self.shape, self.dtype, multiply, _piece(self.shape, self.left))
            square_B = written.squared_norms(budget)
            if written.is_kept:
                self._written = written  # the measured gradients are summed: no further error
                self.left, self.right = self.left.new_empty(0), self.right.new_empty(0)
                return square_B
            norm_B = square_B.sqrt()
            mass_B = masses(self.left, self.right).sum(1)
        bound_B = self._bound(norm_B, mass_B, budget)
        if T == 1:
            self.loose_B = None  # the norm is the mass, and nothing cancels
        return bound_B

    def _gram_pays(self, arithmetic: Arithmetic) -> bool:
        _, T, m = self.left.shape
        n = self.right.shape[-1]
        if kernels.supported(self.left) and self.dtype == torch.float32:
            return gram_pays_on_cuda(T, m, n, arithmetic)
        return gram_is_cheaper(T, m, n + self._beside)

    def _in_float64(self, example: int) -> Tensor:
        return self.left[example].double().T @ self.right[example].double()

    def gram_squares(self, budget: Budget) -> tuple[Tensor, Tensor]:
        """|sum_t l_t r_t^T|^2 and the mass; both are upper bounds."""
        if is_tracing():
            return gram_squares(*self._padded(), budget.arithmetic.name)
        if kernels.usable(self.left) and self.dtype == torch.float32:
            return gram_norms(*self._padded(), budget.arithmetic.name, budget.last_products)
        return _gram_squares_on_cpu(self.left, self.right, budget.last_products)

    def weighted_sum(self, w_B: Tensor) -> Tensor:
        if self._written is not None:
            return self._written.weighted_sum(w_B)
        left, right = self._scaled(self._without_exact(w_B))
        m, n = self.left.shape[-1], self.right.shape[-1]
        if left.shape[1] > 1 and left.transpose(0, 1).is_contiguous():  # time first: the order of rows does not matter
            left, right = left.transpose(0, 1), right.transpose(0, 1)
        if self._upright:
            total = _product(left.flatten(0, 1).T, right.flatten(0, 1), self.dtype)[:m, :n]
        else:  # a linear layer's weight is [outputs, inputs], and contiguous this way
            total = _product(right.flatten(0, 1).T, left.flatten(0, 1), self.dtype)[:n, :m].T
        return self._add_exact(total, w_B).reshape(self.shape)

    def _padded(self) -> tuple[Tensor, Tensor]:
        """Both operands, with long rows zero-padded if their length makes products slow (a vocabulary's)."""
        if self._aligned is None:
            self._aligned = tuple(_aligned(x) for x in (self.left, self.right))
        return self._aligned[0], self._aligned[1]

    def _scaled(self, w_B: Tensor) -> tuple[Tensor, Tensor]:
        """Both operands, the smaller one scaled. Operands in bfloat16 stay so if that error is stated."""
        left, right = self._padded()
        short = {left.dtype, right.dtype} == {torch.bfloat16} and self._arithmetic is not IEEE
        dtype = torch.bfloat16 if short else self.dtype

        def scaled(x_BTm: Tensor) -> Tensor:
            """w_i times the rows of example i. Cached, since several layers may share an input of many positions."""

            def make() -> Tensor:
                return (x_BTm * w_B.to(torch.promote_types(x_BTm.dtype, torch.float32))[:, None, None]).to(dtype)

            return make() if x_BTm.shape[1] == 1 else (self._last_scaled or Last()).of(x_BTm, make, w_B, dtype)

        if left.shape[-1] <= right.shape[-1]:
            return scaled(left), right.to(dtype)
        return left.to(dtype), scaled(right)

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
        self.left, self.right, self._aligned = zeroed(self.left, muted_B), zeroed(self.right, muted_B), None
        super().mute(muted_B)


def _multiplier(left: Tensor, right: Tensor, shape: torch.Size) -> Callable[[slice], Tensor]:
    """Writes out the gradients of some examples. (Not a method of Outer, to avoid a reference cycle.)"""

    dtype = at_least_float32(torch.empty(0, dtype=torch.promote_types(left.dtype, right.dtype))).dtype

    def multiply(examples: slice) -> Tensor:
        product = written_products(left[examples].to(dtype), right[examples].to(dtype))
        return product.view(len(product), *shape)

    return multiply


def _aligned(x_BTm: Tensor) -> Tensor:
    """On CUDA, rows aligned to 16 bytes, with a length that is a multiple of 64 numbers."""
    m = x_BTm.shape[-1]
    if x_BTm.device.type != "cuda" or m < _LONG_ROW or m * x_BTm.element_size() % 16 == 0:
        return x_BTm
    return torch.nn.functional.pad(x_BTm, (0, -m % 64))


def _product(a_mk: Tensor, b_kn: Tensor, dtype: torch.dtype) -> Tensor:
    """a b, summed in `dtype`."""
    return a_mk @ b_kn if a_mk.dtype == dtype else torch.mm(a_mk, b_kn, out_dtype=dtype)


@operator(
    "(Tensor left, Tensor right, str precision) -> (Tensor, Tensor)",
    lambda left, *_: tuple(left.new_empty(len(left), dtype=torch.float64) for _ in range(2)),
)
def gram_squares(left_BTm: Tensor, right_BTn: Tensor, precision: Precision) -> tuple[Tensor, Tensor]:
    """The bounds of `Outer.gram_squares`, as an operator."""
    if kernels.usable(left_BTm) and torch.float64 not in (left_BTm.dtype, right_BTn.dtype):
        return gram_norms(left_BTm, right_BTn, precision)
    return _gram_squares_on_cpu(left_BTm, right_BTn)


def _gram_squares_on_cpu(left_BTm: Tensor, right_BTn: Tensor, last: Last | None = None) -> tuple[Tensor, Tensor]:
    """|sum_t l_t r_t^T|^2 = sum_{t,s} <l_t, l_s> <r_t, r_s> and the mass; both are upper bounds.

    In float64, with inner products of length m and n and T^2 terms, the rounding error is at most
    (m + n + T^2 + 4) u64 M^2, and is added. For few positions `last` caches the inner products of the left rows, and
    their diagonal gives the mass: its error is below that factor.
    """
    B, T, m = left_BTm.shape
    n = right_BTn.shape[-1]
    error = (m + n + T**2 + 4) * roundoff(torch.float64)
    if T < 2 * _POSITIONS and 8 * B * T * T <= CHUNK_BYTES:
        left_BTT = (last or Last()).of(left_BTm, lambda: _all_products(left_BTm))
        right_BTT = _all_products(right_BTn)
        lost = torch.finfo(torch.float64).tiny * (m + n)  # a square below the smallest number is lost
        lengths = ((p_BTT.diagonal(dim1=1, dim2=2) + lost).sqrt() for p_BTT in (left_BTT, right_BTT))
        mass_B = torch.linalg.vecdot(*lengths) * (1 + error)
        gram_B = torch.linalg.vecdot(left_BTT.flatten(1), right_BTT.flatten(1))
        return gram_B.clamp_min(0) + error * mass_B.square(), mass_B
    mass_B = masses(left_BTm, right_BTn).sum(1)
    gram_B = torch.empty_like(mass_B)
    together = _PIECE_BYTES if left_BTm.device.type == "cpu" else None
    for c in chunks(B, 8 * T * (min(m + n, _FEATURES) + 2 * T), together):
        left, right = inner_products(left_BTm[c]), inner_products(right_BTn[c])
        terms = [(1 + (i > j)) * torch.linalg.vecdot(left[i, j], right[i, j]) for i, j in left]
        gram_B[c] = torch.stack(terms).sum(0)
    return gram_B.clamp_min(0) + error * mass_B.square(), mass_B


def _all_products(x_BTm: Tensor) -> Tensor:
    """<x_t, x_s> of the few positions of all examples in float64, [B, T, T]."""
    B, T, m = x_BTm.shape
    together = _CACHED_BYTES if x_BTm.device.type == "cpu" else None
    found = [inner_products(x_BTm[c])[0, 0] for c in chunks(B, 8 * T * (min(m, _FEATURES) + T), together)]
    return torch.cat(found).view(B, T, T)


def inner_products(x_bTm: Tensor) -> dict[tuple[int, int], Tensor]:
    """<x_t, x_s> in float64, for all pairs of positions of an example: flat blocks, keyed by their (i, j).

    They are symmetric, so j <= i is enough for many positions. Features are processed in chunks, so that their float64
    copies stay in a CPU's caches.
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


def _piece(shape: torch.Size, like: Tensor) -> int | None:
    """How many gradients to write out at once on a CPU: larger blocks are mapped and unmapped every time."""
    return max(1, _PIECE_BYTES // bytes_of(1, shape, like.dtype)) if like.device.type == "cpu" else None
