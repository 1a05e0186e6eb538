"""Scales each example, in one pass: out_bkr = f_b t_bkr + bias_k, with 0 in place of f t if f is 0.

An example with f = 0 is excluded, and its entries may be NaN. In place and without a bias, rows with a factor of 1 are
neither read nor written, so that clearing excluded rows costs nothing if there are none.

Legend: B examples, K channels, R positions, E entries of a tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.kernels import launch
from clipwise.kernels.launch import Pointer, blocks, constexpr, device_of, jit, power_of_two, tl

_TILE, _WARPS = 4096, 8  # entries of a tile, and warps per tile


def scaled(t_BKR: Tensor, factor_B: Tensor, bias_K: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """A new tensor with the strides of t, or `out`, which may be t itself."""
    if not launch.fits_float32(t_BKR):
        return scaled_in_torch(t_BKR, factor_B, bias_K, out)
    out = torch.empty_like(t_BKR) if out is None else out
    rows = launch.rows_of(t_BKR, out)
    if rows is None and out.data_ptr() != t_BKR.data_ptr() and launch.rows_of(out) is not None:
        # For example the gradient of a mean, which is one row expanded.
        t_BKR, rows = out.copy_(t_BKR), launch.rows_of(out)
    if rows is None:
        return scaled_in_torch(t_BKR, factor_B, bias_K, out)
    tile = min(_TILE, power_of_two(rows.length))
    with device_of(t_BKR):
        _write_scaled[(len(t_BKR) * blocks(rows.length, tile),)](
            t_BKR, out, factor_B, factor_B if bias_K is None else bias_K, *rows, t_BKR.shape[1],
            t_BKR.stride(0), out.stride(0), 1 if bias_K is None else bias_K.stride(0),
            BIASED=bias_K is not None, SPARES=bias_K is None and out.data_ptr() == t_BKR.data_ptr(),
            TILE=tile, num_warps=_WARPS,
        )  # fmt: skip
    return out


def scaled_in_torch(t_BKR: Tensor, factor_B: Tensor, bias_K: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """The twin of `scaled`."""
    wide = torch.promote_types(t_BKR.dtype, torch.float32)
    factor_B11 = factor_B.to(wide)[:, None, None]
    found = torch.where(factor_B11 > 0, t_BKR.to(wide) * factor_B11, 0)
    if bias_K is not None:
        found += bias_K.to(wide)[:, None]
    return found.to(t_BKR.dtype) if out is None else out.copy_(found)


@jit
def _write_scaled(
    t: Pointer, out: Pointer, factor_B: Pointer, bias_K: Pointer,
    length: int, inner: int, K: int, t_B: int, out_B: int, bias_stride: int,
    BIASED: constexpr, SPARES: constexpr, TILE: constexpr,
) -> None:  # fmt: skip
    """One tile of one example's row, contiguous in memory. Entry e belongs to channel e // inner % K."""
    tiles = tl.cdiv(length, TILE)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    at_E = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    factor = tl.load(factor_B + b).to(tl.float32)
    # A limit of 0 masks the entries that are not read or written.
    is_written_E = at_E < (tl.where(factor != 1.0, length, 0) if SPARES else length)
    counts_E = (at_E < tl.where(factor > 0.0, length, 0)) & is_written_E
    value_E = tl.load(t + b * t_B + at_E, mask=counts_E, other=0.0).to(tl.float32) * factor
    if BIASED:
        at_bias_E = bias_K + (at_E // inner % K) * bias_stride
        value_E += tl.load(at_bias_E, mask=is_written_E, other=0.0).to(tl.float32)
    tl.store(out + b * out_B + at_E, value_E, mask=is_written_E)
