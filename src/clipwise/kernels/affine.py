"""Per-example gradients of a scale and a shift, in one read of their operands.

    y = scale * x_hat + shift,  x_hat = (x - mean) rstd:   sum_r g x_hat  and  sum_r g   for each example.

One kernel serves all. It views an operand as [B, kept, reduced], with any strides. Layer norm keeps features and sums
over positions, with statistics per reduced index. Group norm keeps channels and sums over places, with statistics per
group of kept indices. Sums run in float32.

Legend: B examples, T positions, d or p features, C channels, s places, G groups; K kept entries and
R reduced ones (in a tile, or of an example), S splits of the reduced axis.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.kernels import launch
from clipwise.kernels.launch import Pointer, blocks, constexpr, device_of, jit, power_of_two, tl

_TILE = 2048  # entries of a tile
_PROGRAMS = 256  # about as many as keep a large GPU busy
_LINE = 64  # kept entries of a tile if they are contiguous: 256 bytes of float32


def layer_norm_sums(g_BTd: Tensor, x_BTd: Tensor, mean_BT: Tensor | None, rstd_BT: Tensor) -> tuple[Tensor, Tensor]:
    """sum_t g_t (x_t - mean_t) rstd_t and sum_t g_t, [B, d] each; RMS norm has no mean."""
    if not launch.fits_float32(g_BTd, x_BTd):
        return layer_norm_sums_in_torch(g_BTd, x_BTd, mean_BT, rstd_BT)
    return _sums(g_BTd.mT, x_BTd.mT, mean_BT, rstd_BT, groups=None)


def layer_norm_sums_in_torch(
    g_BTd: Tensor, x_BTd: Tensor, mean_BT: Tensor | None, rstd_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """The twin of `layer_norm_sums`, equal up to the order of its sums."""
    g_BTd, x_BTd, rstd_BT1 = _wide(g_BTd), _wide(x_BTd), rstd_BT[..., None]
    x_hat_BTd = x_BTd * rstd_BT1 if mean_BT is None else (x_BTd - mean_BT[..., None]).mul_(rstd_BT1)
    return x_hat_BTd.mul_(g_BTd).sum(1), g_BTd.sum(1)


def group_norm_sums(g_BCs: Tensor, x_BCs: Tensor, mean_BG: Tensor, rstd_BG: Tensor) -> tuple[Tensor, Tensor]:
    """sum_s g (x - mean) rstd and sum_s g, [B, C] each, with the statistics of each channel's group."""
    if not launch.fits_float32(g_BCs, x_BCs):
        return group_norm_sums_in_torch(g_BCs, x_BCs, mean_BG, rstd_BG)
    return _sums(g_BCs, x_BCs, mean_BG, rstd_BG, groups=mean_BG.shape[1])


def group_norm_sums_in_torch(g_BCs: Tensor, x_BCs: Tensor, mean_BG: Tensor, rstd_BG: Tensor) -> tuple[Tensor, Tensor]:
    """The twin of `group_norm_sums`, equal up to the order of its sums."""
    g_BCs, x_BCs = _wide(g_BCs), _wide(x_BCs)
    each = x_BCs.shape[1] // mean_BG.shape[1]
    mean_BC1, rstd_BC1 = (stat.repeat_interleave(each, dim=1)[..., None] for stat in (mean_BG, rstd_BG))
    return (x_BCs - mean_BC1).mul_(rstd_BC1).mul_(g_BCs).sum(2), g_BCs.sum(2)


def position_sums(g_BTp: Tensor) -> Tensor:
    """sum_t g_t, [B, p]: the gradient of a bias."""
    if not launch.fits_float32(g_BTp):
        return position_sums_in_torch(g_BTp)
    return _sums(g_BTp.mT, None, None, None, groups=None)[1]


def position_sums_in_torch(g_BTp: Tensor) -> Tensor:
    """The twin of `position_sums`, equal up to the order of its sums."""
    return _wide(g_BTp).sum(1)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _sums(
    g_BKR: Tensor, x_BKR: Tensor | None, mean: Tensor | None, rstd: Tensor | None, groups: int | None
) -> tuple[Tensor, Tensor]:
    """Scale and shift, [B, K] each. Statistics are [B, groups], or [B, R] if `groups` is None."""
    B, K, R = g_BKR.shape
    kept, reduced = _tile(K, R, g_BKR)
    programs = B * blocks(K, kept)
    splits, per_split = launch.split(R, reduced, programs, _PROGRAMS)
    partial_2SBK = torch.empty(2, splits, B, K, dtype=torch.float32, device=g_BKR.device)
    x_BKR = g_BKR if x_BKR is None else x_BKR  # a placeholder that is not read
    rstd_BQ = g_BKR[:, 0] if rstd is None else rstd
    mean_BQ = rstd_BQ if mean is None else mean
    with device_of(g_BKR):
        _write_sums[(programs, splits)](
            g_BKR, x_BKR, mean_BQ, rstd_BQ, partial_2SBK, B, K, R, per_split, K // (groups or 1),
            *g_BKR.stride(), *x_BKR.stride(), *mean_BQ.stride(), *rstd_BQ.stride(),
            SCALED=rstd is not None, CENTRED=mean is not None, MISSING=0 if groups is None else 1,
            KEPT=kept, REDUCED=reduced,
        )  # fmt: skip
    scale_BK, shift_BK = launch.added(partial_2SBK, 1)
    return scale_BK, shift_BK


def _tile(K: int, R: int, g_BKR: Tensor) -> tuple[int, int]:
    """Kept and reduced entries of a tile, longer along the contiguous axis."""
    if g_BKR.stride(1) <= g_BKR.stride(2):
        kept = min(_LINE, power_of_two(K))
        return kept, min(_TILE // kept, power_of_two(R))
    reduced = min(_TILE // 4, power_of_two(R))
    return min(_TILE // reduced, power_of_two(K)), reduced


@jit
def _write_sums(
    g: Pointer, x: Pointer, mean: Pointer, rstd: Pointer, partial_2SBK: Pointer,
    B: int, K: int, R: int, per_split: int, per_group: int, g_B: int, g_K: int, g_R: int, x_B: int,
    x_K: int, x_R: int, mean_B: int, mean_Q: int, rstd_B: int, rstd_Q: int,
    SCALED: constexpr, CENTRED: constexpr, MISSING: constexpr, KEPT: constexpr, REDUCED: constexpr,
) -> None:  # fmt: skip
    """KEPT sums over one split of the reduced axis of one example.

    g_K is g's stride along K, and so on. MISSING is the axis of a tile [K, R] along which statistics are constant.
    """
    tiles = tl.cdiv(K, KEPT)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    split = tl.program_id(1)
    kept_K = tl.program_id(0) % tiles * KEPT + tl.arange(0, KEPT)
    is_kept_K = kept_K < K
    kept_K = kept_K.to(tl.int64)
    scale_KR = tl.zeros([KEPT, REDUCED], tl.float32)
    shift_KR = tl.zeros([KEPT, REDUCED], tl.float32)
    for r in range(0, per_split, REDUCED):
        r_R = split * per_split + r + tl.arange(0, REDUCED)
        is_there_R = r_R < R
        inside_KR = is_kept_K[:, None] & is_there_R[None, :]
        r_R = r_R.to(tl.int64)
        at_g_KR = g + b * g_B + kept_K[:, None] * g_K + r_R[None, :] * g_R
        g_KR = tl.load(at_g_KR, mask=inside_KR, other=0.0).to(tl.float32)
        shift_KR += g_KR
        if SCALED:
            at_x_KR = x + b * x_B + kept_K[:, None] * x_K + r_R[None, :] * x_R
            x_KR = tl.load(at_x_KR, mask=inside_KR, other=0.0).to(tl.float32)
            if MISSING == 1:
                q, is_there = kept_K // per_group, is_kept_K
            else:
                q, is_there = r_R, is_there_R
            if CENTRED:
                mean_q = tl.load(mean + b * mean_B + q * mean_Q, mask=is_there, other=0.0)
                x_KR -= tl.expand_dims(mean_q, MISSING).to(tl.float32)
            rstd_q = tl.load(rstd + b * rstd_B + q * rstd_Q, mask=is_there, other=0.0)
            scale_KR += g_KR * (x_KR * tl.expand_dims(rstd_q, MISSING).to(tl.float32))
    at_K = partial_2SBK + (split * B + b) * K + kept_K
    tl.store(at_K, tl.sum(scale_KR, axis=1), mask=is_kept_K)
    tl.store(at_K + tl.num_programs(1).to(tl.int64) * B * K, tl.sum(shift_KR, axis=1), mask=is_kept_K)
