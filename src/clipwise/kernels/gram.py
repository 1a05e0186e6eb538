"""Bounds on the norm of sum_t l_t r_t^T from inner products of positions, without writing the sum out.

    |sum_t l_t r_t^T|^2 = sum_{t,s} L_ts R_ts,   L_ts = <l_t, l_s>,   R_ts = <r_t, r_s>.

L and R are matrix products of the library, a chunk of features at a time. They are symmetric: for long sequences only
the blocks on and below the diagonal are computed, and those below count twice. One kernel then reads both once, for the
sums over L R, L^2 and R^2 and for the diagonals, which give the norms |l_t|, |r_t|.

**Why it is an upper bound.** The library sums K features in an order of its choice, and the m/K results are summed in
float32. A tensor core step adds four products or more to its accumulator. It may truncate instead of rounding: each
product, the accumulator and the result, by v = 2^-23 of the largest. That is six truncations per four products. An
addition or a product in float32 loses v/2. No intermediate value exceeds sum_i |l_ti| |l_si| <= |l_t| |l_s| by more
than these errors, so with c = 3/2 K + m / K

    |L^_ts - L_ts| <= gamma |l_t| |l_s| + e,   gamma = c v (1 + c v),   e = 8 m tiny,

where e bounds the loss of products and sums below the smallest normal float32. Let a_t^2 = (L^_tt + e) / (1 - gamma)
+ e / gamma. Then a_t >= |l_t|, and gamma a_t a_s >= gamma |l_t| |l_s| + e by Cauchy-Schwarz, so that the
error of L^_ts is at most gamma a_t a_s. With b_t and gamma' defined likewise for r,

    |sum L^ R^ - sum L R| <= gamma sum a_t a_s |R^_ts| + gamma' sum b_t b_s |L^_ts| + gamma gamma' N^2
                          <= min( gamma |a|^2 |R^|_F + gamma' |b|^2 |L^|_F,
                                  (gamma + gamma')(1 + gamma)(1 + gamma') N^2 ) + gamma gamma' N^2,

N = sum_t a_t b_t, by Cauchy-Schwarz again. The first is smaller by about sqrt(T) if positions are nearly orthogonal. It
is added to the square. Products of inner products are exact in float64, and the T^2 additions lose at most
T^2 2^-53 |L^|_F |R^|_F, which is added too.

**Precision.** Rows of bfloat16 and float16 have exact products. For float32,

    "tf32"  The tensor cores read 11 significant bits: l~ with |l~ - l| <= 2^-10 |l|. The above holds for l~ and r~: the
            square bounds |sum_t l~_t r~_t^T|^2, and the caller adds the effect of the truncation, at most
            `OPERAND_ERROR` times the mass. The mass is that of the original rows.
    "ieee"  The square bounds that of the original rows. A GPU with float64 as fast as float32 uses the twin, which has
            negligible error.

The caller ensures that products run in this precision (gradients/precision.py).

Legend: B examples, T positions, m and n features; K features of a chunk; P blocks of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from clipwise.kernels import usable
from clipwise.kernels.launch import Pointer, blocks, constexpr, device_of, jit, power_of_two, tl

Precision = Literal["tf32", "ieee"]

# |l r^T - l~ r~^T| <= OPERAND_ERROR |l| |r| for rows truncated to tf32: (1 + 2^-10)^2 - 1.
OPERAND_ERROR = (1 + 2.0**-10) ** 2 - 1
_UNCUT = (1 - 2.0**-10) ** -1 * (1 + 2.0**-41)  # |l| <= _UNCUT |l~|
_CUT_OFF = 2.0**-23  # v
_UNIT = 2.0**-53
_TINY = torch.finfo(torch.float32).tiny
_CHUNK, _LONG_CHUNK = 1536, 4096  # largest chunk of features, and the largest for very many features
_LONG = 8192
_SHORT = 512  # up to this many positions one product is faster than three products of blocks
_ALIGNED = 4  # float32 numbers in 16 bytes: unaligned rows are slow to read and write
_SIDE = 128  # positions of a tile of these products
_BLOCK = 1024  # entries of L and of R that a program holds,
_TIMES = 8  # one after another
_INNER_BYTES = 2 * 2**30  # inner products of both operands at a time
_TWIN_BYTES = 64 * 2**20  # float64 copies of operands that the twin makes at a time


class Last:
    """Caches the last result: consecutive layers often share an input."""

    def __init__(self) -> None:
        self._key: tuple[Tensor, tuple[object, ...]] | None = None
        self._made: Tensor | None = None

    def of(self, x: Tensor, make: Callable[[], Tensor], *others: object) -> Tensor:
        """The cached result if it was computed from the same tensor and the same other arguments; or a new one."""
        key, made = self._key, self._made
        if (
            key is None
            or made is None
            or not _is_same(key[0], x)
            or any(a is not b for a, b in zip(key[1], others, strict=True))
        ):
            self._key, self._made = (x, others), (made := make())
        return made


def gram_norms(
    left_BTm: Tensor, right_BTn: Tensor, precision: Precision, last: Last | None = None
) -> tuple[Tensor, Tensor]:
    """For each example an upper bound on |sum_t l_t r_t^T|^2 and on the mass sum_t |l_t| |r_t|, in float64.

    Args:
        left_BTm: rows l_t of any strides, float32, bfloat16 or float16 (float64 uses the twin).
        right_BTn: rows r_t likewise.
        precision: of products of float32. With "tf32" the square is that of the rows truncated to tf32, and the
            bound on the norm is sqrt(square) + OPERAND_ERROR * mass.
        last: caches the left rows' inner products for the next call.
    """
    B, T, m = left_BTm.shape
    n = right_BTn.shape[-1]
    is_wide = torch.float64 in (left_BTm.dtype, right_BTn.dtype)
    is_exact = precision == "ieee" and _has_fast_float64(left_BTm.device)
    if min(B, T, m, n) == 0 or is_wide or is_exact or not usable(left_BTm):
        return gram_norms_in_torch(left_BTm, right_BTn)
    together = max(1, _INNER_BYTES // (8 * T * T))
    if together < B:  # a long context
        pairs = zip(torch.split(left_BTm, together), torch.split(right_BTn, together), strict=True)
        found = [gram_norms(left, right, precision) for left, right in pairs]
        return torch.cat([square for square, _ in found]), torch.cat([mass for _, mass in found])
    left_BTT = (last or Last()).of(left_BTm, lambda: inner_products(left_BTm))
    right_BTT = inner_products(right_BTn)
    device = left_BTm.device
    columns = min(power_of_two(T), 256)
    rows = max(1, min(_BLOCK // columns, power_of_two(T)))
    programs = blocks(T, rows * _TIMES)
    partial_BP3 = torch.empty(B, programs, 3, dtype=torch.float64, device=device)
    diagonal_2BT = torch.empty(2, B, T, dtype=torch.float32, device=device)
    square_B, mass_B = (torch.empty(B, dtype=torch.float64, device=device) for _ in range(2))
    with device_of(left_BTm):
        _write_sums[(B, programs)](
            left_BTT, right_BTT, partial_BP3, diagonal_2BT, T, _first_block(T), left_BTT.stride(0),
            left_BTT.stride(1),
            ROWS=rows, COLUMNS=columns, TIMES=_TIMES,
        )  # fmt: skip
        _write_bounds[(B,)](
            partial_BP3, diagonal_2BT, square_B, mass_B, T, m, n, programs, _cuts(m), _cuts(n),
            CUT_OFF=_CUT_OFF, UNIT=_UNIT, TINY=_TINY,
            UNCUT=_uncut(left_BTm, precision) * _uncut(right_BTn, precision), BLOCK=256,
        )  # fmt: skip
    return square_B, mass_B


@cache
def _has_fast_float64(device: torch.device) -> bool:
    """Whether the GPU has float64 tensor cores, as large GPUs do. On others float64 is much slower than float32."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in ((8, 0), (9, 0), (10, 0))


def inner_products(x_BTm: Tensor) -> Tensor:
    """<x_t, x_s> of all positions of each example, in float32; blocks above the diagonal are not filled.

    These products are slow if the number of positions is not a multiple of 4. In that case a few rows of the next
    example are multiplied too, if they follow in memory, and their results are dropped.
    """
    B, T, m = x_BTm.shape
    more = blocks(T, _ALIGNED) * _ALIGNED
    inner_BSS = torch.empty(B, more, more, device=x_BTm.device)
    follows = B > 1 and x_BTm.stride(0) == T * x_BTm.stride(1) and more <= 2 * T
    if more == T or not follows:
        _add_products(inner_BSS[:, :T, :T], x_BTm)
    else:
        x_BSm = x_BTm.as_strided((B - 1, more, m), x_BTm.stride())
        _add_products(inner_BSS[:-1], x_BSm)
        _add_products(inner_BSS[-1:, :T, :T], x_BTm[-1:])
    return inner_BSS[:, :T, :T]


def _add_products(inner_BTT: Tensor, x_BTm: Tensor) -> None:
    """Adds the products chunk by chunk of features, and block by block."""
    T, m = x_BTm.shape[1:]
    K, first = _chunk(m), _first_block(T)
    for k in range(0, m, K):
        x_BTK = x_BTm[..., k : k + K].float()
        for rows in (slice(0, first), slice(first, T)) if first < T else (slice(0, T),):
            for columns in (slice(0, first), slice(first, T))[: 1 + (rows.start > 0)]:
                inner_BTT[:, rows, columns].baddbmm_(x_BTK[:, rows], x_BTK[:, columns].mT, beta=1 if k else 0)


def _first_block(T: int) -> int:
    """Positions in the first of two blocks: whole tiles, about half of all; or T, if one product is used."""
    return T if T <= _SHORT else blocks(T, 2 * _SIDE) * _SIDE


def _is_same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are the same view of the same memory."""
    return _place(x) == _place(y)


def _place(x: Tensor) -> tuple[object, ...]:
    """(Not by `data_ptr`, which traced tensors do not have.)"""
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype


def _chunk(m: int) -> int:
    """Features per chunk: all chunks equal, except for the remainder in the last one."""
    if m > _LONG:
        return _LONG_CHUNK
    return blocks(blocks(m, blocks(m, _CHUNK)), _ALIGNED) * _ALIGNED


def _cuts(m: int) -> int:
    """c, with a margin of one."""
    in_chunk = min(m, _chunk(m))
    cuts = in_chunk + 2 * blocks(in_chunk, 4) + blocks(m, _chunk(m)) + 1
    assert cuts * _CUT_OFF < 0.1  # gamma stays far below 1 for any realistic m
    return cuts


def _uncut(x: Tensor, precision: Precision) -> float:
    return _UNCUT if x.dtype == torch.float32 and precision == "tf32" else 1.0


def gram_norms_in_torch(left_BTm: Tensor, right_BTn: Tensor) -> tuple[Tensor, Tensor]:
    """The twin of `gram_norms`, in float64, for the original rows: the results differ by at most the kernel's error.

    Inner products of m and n terms and T^2 products lose at most (m + n + T^2 + 4) u M^2.
    """
    B, T, m = left_BTm.shape
    n = right_BTn.shape[-1]
    square_B, mass_B = torch.zeros(2, B, dtype=torch.float64, device=left_BTm.device).unbind()
    step = max(1, _TWIN_BYTES // max(1, 8 * T * (m + n + 2 * T)))
    for c in (slice(i, i + step) for i in range(0, B, step)):
        left, right = left_BTm[c].double(), right_BTn[c].double()
        square_B[c] = ((left @ left.mT) * (right @ right.mT)).sum((1, 2))
        mass_B[c] = (torch.linalg.vector_norm(left, dim=2) * torch.linalg.vector_norm(right, dim=2)).sum(1)
    mass_B *= 1 + 2 * (m + n + T + 8) * _UNIT
    square_B.masked_fill_(square_B < 0, 0)  # keeps NaN
    return square_B + 2 * (m + n + T**2 + 4) * _UNIT * mass_B.square(), mass_B


@jit
def _write_sums(
    left_BTT: Pointer, right_BTT: Pointer, partial_BP3: Pointer, diagonal_2BT: Pointer,
    T: int, first: int, stride_B: int, stride_T: int,
    ROWS: constexpr, COLUMNS: constexpr, TIMES: constexpr,
) -> None:  # fmt: skip
    """The contribution of some rows of L and R to sum L R, sum L^2, sum R^2 and the diagonals."""
    b = tl.program_id(0).to(tl.int64)
    below = tl.num_programs(0).to(tl.int64) * T
    lr = tl.zeros([ROWS, COLUMNS], tl.float64)
    ll = tl.zeros([ROWS, COLUMNS], tl.float64)
    rr = tl.zeros([ROWS, COLUMNS], tl.float64)
    for turn in range(0, TIMES):
        row_R = (tl.program_id(1) * TIMES + turn) * ROWS + tl.arange(0, ROWS)
        is_row_R = row_R < T
        at_R = b * stride_B + row_R * stride_T
        end_R = tl.where(row_R < first, first, T)  # no block above the diagonal
        for start in range(0, T, COLUMNS):
            column_C = start + tl.arange(0, COLUMNS)
            is_there = is_row_R[:, None] & (column_C[None, :] < end_R[:, None])
            at_RC = at_R[:, None] + column_C[None, :]
            l_RC = tl.load(left_BTT + at_RC, mask=is_there, other=0.0).to(tl.float64)
            r_RC = tl.load(right_BTT + at_RC, mask=is_there, other=0.0).to(tl.float64)
            twice = (row_R >= first)[:, None] & (column_C < first)[None, :]
            doubled_RC = tl.where(twice, 2.0 * l_RC, l_RC)
            lr += doubled_RC * r_RC
            ll += doubled_RC * l_RC
            rr += tl.where(twice, 2.0 * r_RC, r_RC) * r_RC
        diagonal_R = at_R + row_R
        store_R = diagonal_2BT + b * T + row_R
        tl.store(store_R, tl.load(left_BTT + diagonal_R, mask=is_row_R, other=0.0), mask=is_row_R)
        tl.store(store_R + below, tl.load(right_BTT + diagonal_R, mask=is_row_R, other=0.0), mask=is_row_R)
    at = partial_BP3 + 3 * (b * tl.num_programs(1) + tl.program_id(1))
    tl.store(at, tl.sum(tl.sum(lr, axis=1), axis=0))
    tl.store(at + 1, tl.sum(tl.sum(ll, axis=1), axis=0))
    tl.store(at + 2, tl.sum(tl.sum(rr, axis=1), axis=0))


@jit
def _gamma(cuts: int, CUT_OFF: constexpr) -> Pointer:
    """c v (1 + c v)."""
    error = cuts * tl.full([], CUT_OFF, tl.float64)
    return error * (1.0 + error)


@jit
def _length_squared(inner_T: Pointer, n: int, gamma: Pointer, TINY: constexpr) -> Pointer:
    """a_t^2 = (L^_tt + e) / (1 - gamma) + e / gamma."""
    lost = 8 * n * tl.full([], TINY, tl.float64)
    return (inner_T.to(tl.float64) + lost) / (1.0 - gamma) + lost / gamma


@jit
def _write_bounds(
    partial_BP3: Pointer, diagonal_2BT: Pointer, square_B: Pointer, mass_B: Pointer,
    T: int, m: int, n: int, pairs: int, left_cuts: int, right_cuts: int,
    CUT_OFF: constexpr, UNIT: constexpr, TINY: constexpr, UNCUT: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """The two bounds of one example, from its blocks and diagonals."""
    b = tl.program_id(0).to(tl.int64)
    B = tl.num_programs(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    gamma_l = _gamma(left_cuts, CUT_OFF)
    gamma_r = _gamma(right_cuts, CUT_OFF)

    mass = tl.zeros([BLOCK], tl.float64)
    left = tl.zeros([BLOCK], tl.float64)
    right = tl.zeros([BLOCK], tl.float64)
    for start in range(0, T, BLOCK):
        is_there = start + block < T
        at = diagonal_2BT + b * T + start + block
        l_inner = tl.load(at, mask=is_there, other=0.0)
        r_inner = tl.load(at + B * T, mask=is_there, other=0.0)
        l_square = tl.where(is_there, _length_squared(l_inner, m, gamma_l, TINY), 0.0)
        r_square = tl.where(is_there, _length_squared(r_inner, n, gamma_r, TINY), 0.0)
        mass += tl.sqrt(l_square) * tl.sqrt(r_square)
        left += l_square
        right += r_square

    lr = tl.zeros([BLOCK], tl.float64)
    ll = tl.zeros([BLOCK], tl.float64)
    rr = tl.zeros([BLOCK], tl.float64)
    for start in range(0, pairs, BLOCK):
        is_there = start + block < pairs
        at = partial_BP3 + 3 * (b * pairs + start + block)
        lr += tl.load(at, mask=is_there, other=0.0)
        ll += tl.load(at + 1, mask=is_there, other=0.0)
        rr += tl.load(at + 2, mask=is_there, other=0.0)

    # A relative margin of 2^-20 covers the rounding of these: they bound errors, or are the mass.
    spare = 1.0 + 9.5367431640625e-07
    mass_all = tl.sum(mass, axis=0) * spare
    l_frobenius = tl.sqrt(tl.sum(ll, axis=0)) * spare
    r_frobenius = tl.sqrt(tl.sum(rr, axis=0)) * spare
    by_frobenius = gamma_l * tl.sum(left, axis=0) * r_frobenius + gamma_r * tl.sum(right, axis=0) * l_frobenius
    by_mass = (gamma_l + gamma_r) * (1.0 + gamma_l) * (1.0 + gamma_r) * mass_all * mass_all
    error = tl.where(by_frobenius < by_mass, by_frobenius, by_mass) + gamma_l * gamma_r * mass_all * mass_all
    summing = (1.0 * T * T + 64.0) * tl.full([], 2 * UNIT, tl.float64) * l_frobenius * r_frobenius
    gram = tl.sum(lr, axis=0)
    gram = tl.where(gram < 0.0, 0.0, gram)  # keeps NaN
    tl.store(square_B + b, gram + (error + summing) * spare)
    tl.store(mass_B + b, mass_all * UNCUT)
