"""One factor an example, in one pass: out_bkr = f_b t_bkr + bias_k, and 0 in place of f t where f is 0.

Where f is 0 an example does not count, and its entries may be NaN. In place and without a bias, rows with a factor of 1
are neither read nor written: to clear rows of which there are none costs nothing.

Legend: B examples, K channels, R positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.kernels import usable
from clipwise.kernels.language import Pointer, blocks, constexpr, device_of, jit, tl
from clipwise.kernels.tiles import tile_of


def scaled(
    t_BKR: Tensor, factor_B: Tensor, bias_K: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """A new tensor laid out as t, or `out`, which may be t itself."""
    if not usable(t_BKR) or t_BKR.numel() == 0 or t_BKR.dtype == torch.float64:
        return scaled_in_torch(t_BKR, factor_B, bias_K, out)
    out = torch.empty_like(t_BKR) if out is None else out
    B, K, R = t_BKR.shape
    kept, rest = tile_of(t_BKR)
    with device_of(t_BKR):
        _write_scaled[(B * blocks(K, kept), blocks(R, rest))](
            t_BKR,
            out,
            factor_B,
            factor_B if bias_K is None else bias_K,
            K,
            R,
            *t_BKR.stride(),
            *out.stride(),
            1 if bias_K is None else bias_K.stride(0),
            BIASED=bias_K is not None,
            SPARES=bias_K is None and out.data_ptr() == t_BKR.data_ptr(),
            KEPT=kept,
            REST=rest,
        )
    return out


def scaled_in_torch(
    t_BKR: Tensor, factor_B: Tensor, bias_K: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """The twin of `scaled`."""
    wide = torch.promote_types(t_BKR.dtype, torch.float32)
    factor_B11 = factor_B.to(wide)[:, None, None]
    found = torch.where(factor_B11 > 0, t_BKR.to(wide) * factor_B11, 0)
    if bias_K is not None:
        found += bias_K.to(wide)[:, None]
    return found.to(t_BKR.dtype) if out is None else out.copy_(found)


@jit
def _write_scaled(
    t: Pointer,
    out: Pointer,
    factor_B: Pointer,
    bias_K: Pointer,
    K: int,
    R: int,
    t_B: int,
    t_K: int,
    t_R: int,
    out_B: int,
    out_K: int,
    out_R: int,
    bias_stride: int,
    BIASED: constexpr,
    SPARES: constexpr,
    KEPT: constexpr,
    REST: constexpr,
) -> None:
    """One tile of one example. t_K is t's stride along K."""
    tiles = tl.cdiv(K, KEPT)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    k_K = tl.program_id(0) % tiles * KEPT + tl.arange(0, KEPT)
    r_R = tl.program_id(1) * REST + tl.arange(0, REST)
    is_there_R = (r_R < R)[None, :]
    factor = tl.load(factor_B + b).to(tl.float32)
    # What is not to be read, or written, lies beyond the end.
    written_K = k_K < (tl.where(factor != 1.0, K, 0) if SPARES else K)
    inside_KR = written_K[:, None] & is_there_R
    counts_KR = (k_K < tl.where(factor > 0.0, K, 0))[:, None] & inside_KR
    k_K, r_R = k_K.to(tl.int64), r_R.to(tl.int64)
    at_KR = t + b * t_B + k_K[:, None] * t_K + r_R[None, :] * t_R
    value_KR = tl.load(at_KR, mask=counts_KR, other=0.0).to(tl.float32) * factor
    if BIASED:
        bias = tl.load(bias_K + k_K * bias_stride, mask=written_K, other=0.0).to(tl.float32)
        value_KR += bias[:, None]
    tl.store(out + b * out_B + k_K[:, None] * out_K + r_R[None, :] * out_R, value_KR, mask=inside_KR)
