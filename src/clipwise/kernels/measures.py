"""Sums over the positions of an upstream gradient, in one read of it.

    sum_r g_kr,   sum_r |g_kr|,   sum_r l_r |g_kr|,   sum_r g_kr^2      for each example and channel k

Squares are summed in float64, where the square of a float32 is exact; the others in float32, in blocks. Their error is
below 2^-15 of the sum of absolute terms, since at most 256 terms are added sequentially.

Legend: B examples, K channels, R positions, G groups of channels, each with a length l for every position; S splits of
the positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from clipwise.kernels import launch
from clipwise.kernels.launch import Pointer, blocks, constexpr, device_of, jit, tl

_TILE = 1024  # entries of a tile
_PROGRAMS = 256  # about as many as keep a large GPU busy
_LONGEST = 256  # terms that are added sequentially


class Measures(NamedTuple):
    """The requested sums, [B, K] each."""

    total: Tensor | None
    mass: Tensor | None
    weighted: Tensor | None
    square: Tensor | None


def measures(
    g_BKR: Tensor, lengths_BGR: Tensor | None = None, *, total: bool = False, mass: bool = False, square: bool = False
) -> Measures:
    """The requested sums; the weighted one if lengths are given."""
    if not launch.fits_float32(g_BKR):
        return measures_in_torch(g_BKR, lengths_BGR, total=total, mass=mass, square=square)
    B, K, R = g_BKR.shape
    kept, reduced = launch.tile_of(g_BKR, _TILE)
    programs = B * blocks(K, kept)
    least = blocks(R, _LONGEST * reduced)
    splits, per_split = launch.split(R, reduced, programs, _PROGRAMS, least=max(1, least))
    wanted = (total, mass, lengths_BGR is not None, square)
    partial = [
        torch.empty(splits, B, K, dtype=dtype, device=g_BKR.device) if is_wanted else None
        for is_wanted, dtype in zip(wanted, (*[torch.float32] * 3, torch.float64), strict=True)
    ]
    per_group = g_BKR if lengths_BGR is None else lengths_BGR  # a placeholder that is not read
    with device_of(g_BKR):
        _write_measures[(programs, splits)](
            g_BKR, per_group, *(per_group if t is None else t for t in partial), B, K, R, per_split,
            K // (1 if lengths_BGR is None else lengths_BGR.shape[1]), *g_BKR.stride(), *per_group.stride(),
            *wanted,
            KEPT=kept, REDUCED=reduced,
        )  # fmt: skip
    return Measures(*(None if t is None else launch.added(t) for t in partial))


def measures_in_torch(
    g_BKR: Tensor, lengths_BGR: Tensor | None = None, *, total: bool = False, mass: bool = False, square: bool = False
) -> Measures:
    """The twin of `measures`, equal up to the order of its sums."""
    g_BKR = g_BKR if g_BKR.dtype == torch.float64 else g_BKR.float()
    weighted_BK = None
    if lengths_BGR is not None:
        G = lengths_BGR.shape[1]
        of_channel_BKR = lengths_BGR.to(g_BKR.dtype).repeat_interleave(g_BKR.shape[1] // G, 1)
        weighted_BK = (g_BKR.abs() * of_channel_BKR).sum(2)
    return Measures(
        g_BKR.sum(2) if total else None,
        g_BKR.abs().sum(2) if mass else None,
        weighted_BK,
        g_BKR.double().square().sum(2) if square else None,
    )


@jit
def _write_measures(
    g: Pointer, lengths: Pointer, total_SBK: Pointer, mass_SBK: Pointer, weighted_SBK: Pointer,
    square_SBK: Pointer,
    B: int, K: int, R: int, per_split: int, per_group: int, g_B: int, g_K: int, g_R: int, l_B: int,
    l_G: int, l_R: int,
    TOTAL: constexpr, MASS: constexpr, WEIGHTED: constexpr, SQUARE: constexpr, KEPT: constexpr,
    REDUCED: constexpr,
) -> None:  # fmt: skip
    """The sums of KEPT channels over one split of the positions of one example. g_K is g's stride along K."""
    tiles = tl.cdiv(K, KEPT)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    split = tl.program_id(1)
    kept_K = tl.program_id(0) % tiles * KEPT + tl.arange(0, KEPT)
    is_kept_K = kept_K < K
    kept_K = kept_K.to(tl.int64)
    total_KR = tl.zeros([KEPT, REDUCED], tl.float32)
    mass_KR = tl.zeros([KEPT, REDUCED], tl.float32)
    weighted_KR = tl.zeros([KEPT, REDUCED], tl.float32)
    square_KR = tl.zeros([KEPT, REDUCED], tl.float64)
    for r in range(0, per_split, REDUCED):
        r_R = split * per_split + r + tl.arange(0, REDUCED)
        inside_KR = is_kept_K[:, None] & (r_R < R)[None, :]
        r_R = r_R.to(tl.int64)
        at_KR = g + b * g_B + kept_K[:, None] * g_K + r_R[None, :] * g_R
        g_KR = tl.load(at_KR, mask=inside_KR, other=0.0).to(tl.float32)
        if TOTAL:
            total_KR += g_KR
        if MASS:
            mass_KR += tl.abs(g_KR)
        if WEIGHTED:
            group_K = kept_K // per_group
            at_KR = lengths + b * l_B + group_K[:, None] * l_G + r_R[None, :] * l_R
            length_KR = tl.load(at_KR, mask=inside_KR, other=0.0).to(tl.float32)
            weighted_KR += length_KR * tl.abs(g_KR)
        if SQUARE:
            exact_KR = g_KR.to(tl.float64)
            square_KR += exact_KR * exact_KR
    at_K = (split * B + b) * K + kept_K
    if TOTAL:
        tl.store(total_SBK + at_K, tl.sum(total_KR, axis=1), mask=is_kept_K)
    if MASS:
        tl.store(mass_SBK + at_K, tl.sum(mass_KR, axis=1), mask=is_kept_K)
    if WEIGHTED:
        tl.store(weighted_SBK + at_K, tl.sum(weighted_KR, axis=1), mask=is_kept_K)
    if SQUARE:
        tl.store(square_SBK + at_K, tl.sum(square_KR, axis=1), mask=is_kept_K)
