"""Take out of a gradient what is along the input that was clipped, in place.

    dx <- f dx - u (u^T f dx),   u = x / |x| where the input was clipped, else 0;   f = 1 / nu or 1

One program an example: it reads x and dx twice, and finds them in the cache the second time. Rows that stay as they are
(f = 1, not clipped) are not touched, whatever they hold.

Legend: B examples, [K, R] entries of each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.kernels import usable
from clipwise.kernels.language import Pointer, constexpr, device_of, jit, tl
from clipwise.kernels.tiles import tile_of


def to_tangent_(
    dx_BKR: Tensor, x_BKR: Tensor, norm_B: Tensor, scale_B: Tensor, nu_B: Tensor | None = None
) -> Tensor:
    """In place; `scale_B` says whose input was clipped (0 < s < 1), and |x| is `norm_B`. Without `nu_B` f is 1."""
    if not usable(dx_BKR) or dx_BKR.numel() == 0 or torch.float64 in (dx_BKR.dtype, x_BKR.dtype):
        return to_tangent_in_torch_(dx_BKR, x_BKR, norm_B, scale_B, nu_B)
    B, K, R = dx_BKR.shape
    kept, rest = tile_of(dx_BKR)
    with device_of(dx_BKR):
        _write_tangent[(B,)](
            dx_BKR,
            x_BKR,
            norm_B,
            scale_B,
            norm_B if nu_B is None else nu_B,
            K,
            R,
            *dx_BKR.stride(),
            *x_BKR.stride(),
            RESTORED=nu_B is not None,
            KEPT=kept,
            REST=rest,
        )
    return dx_BKR


def to_tangent_in_torch_(
    dx_BKR: Tensor, x_BKR: Tensor, norm_B: Tensor, scale_B: Tensor, nu_B: Tensor | None = None
) -> Tensor:
    """The twin of `to_tangent_`."""
    wide = torch.promote_types(dx_BKR.dtype, torch.float32)
    if nu_B is not None:
        dx_BKR.mul_(torch.where(nu_B > 0, 1 / nu_B, 0.0).to(wide)[:, None, None])
    is_clipped_B11 = ((scale_B < 1) & (scale_B > 0))[:, None, None]
    unit_BKR = torch.where(is_clipped_B11, x_BKR.to(wide) / norm_B.to(wide)[:, None, None], 0)
    along_B11 = (unit_BKR * torch.where(is_clipped_B11, dx_BKR, 0)).sum((1, 2), keepdim=True)
    return dx_BKR.sub_((unit_BKR * along_B11).to(dx_BKR.dtype))


@jit
def _write_tangent(
    dx: Pointer,
    x: Pointer,
    norm_B: Pointer,
    scale_B: Pointer,
    nu_B: Pointer,
    K: int,
    R: int,
    dx_B: int,
    dx_K: int,
    dx_R: int,
    x_B: int,
    x_K: int,
    x_R: int,
    RESTORED: constexpr,
    KEPT: constexpr,
    REST: constexpr,
) -> None:
    """One example. dx_K is dx's stride along K."""
    b = tl.program_id(0).to(tl.int64)
    scale = tl.load(scale_B + b)
    inverse = tl.where(scale > 0.0, 1.0 / tl.load(norm_B + b), 0.0)
    inverse = tl.where(scale < 1.0, inverse, 0.0).to(tl.float32)
    # What is not to be read, or changed, lies beyond the end.
    clipped_K = tl.where(inverse > 0.0, K, 0)
    changed_K = clipped_K
    factor = tl.full([], 1.0, tl.float32)
    if RESTORED:
        nu = tl.load(nu_B + b)
        factor = tl.where(nu > 0.0, 1.0 / nu, 0.0).to(tl.float32)
        changed_K = tl.where(factor != 1.0, K, clipped_K)
    product_KR = tl.zeros([KEPT, REST], tl.float32)
    for k in range(0, clipped_K, KEPT):
        for r in range(0, R, REST):
            k_K = (k + tl.arange(0, KEPT)).to(tl.int64)
            r_R = (r + tl.arange(0, REST)).to(tl.int64)
            inside_KR = (k_K < clipped_K)[:, None] & (r_R < R)[None, :]
            at_dx_KR = dx + b * dx_B + k_K[:, None] * dx_K + r_R[None, :] * dx_R
            at_x_KR = x + b * x_B + k_K[:, None] * x_K + r_R[None, :] * x_R
            dx_KR = tl.load(at_dx_KR, mask=inside_KR, other=0.0).to(tl.float32)
            x_KR = tl.load(at_x_KR, mask=inside_KR, other=0.0).to(tl.float32)
            product_KR += (x_KR * inverse) * (dx_KR * factor)
    along = tl.sum(tl.sum(product_KR, axis=1), axis=0)
    for k in range(0, changed_K, KEPT):
        for r in range(0, R, REST):
            k_K = (k + tl.arange(0, KEPT)).to(tl.int64)
            r_R = (r + tl.arange(0, REST)).to(tl.int64)
            inside_KR = (k_K < changed_K)[:, None] & (r_R < R)[None, :]
            clipped_KR = (k_K < clipped_K)[:, None] & (r_R < R)[None, :]
            at_dx_KR = dx + b * dx_B + k_K[:, None] * dx_K + r_R[None, :] * dx_R
            at_x_KR = x + b * x_B + k_K[:, None] * x_K + r_R[None, :] * x_R
            dx_KR = tl.load(at_dx_KR, mask=inside_KR, other=0.0).to(tl.float32)
            x_KR = tl.load(at_x_KR, mask=clipped_KR, other=0.0).to(tl.float32)
            tl.store(at_dx_KR, dx_KR * factor - (x_KR * inverse) * along, mask=inside_KR)
