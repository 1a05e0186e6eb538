"""Removes from a gradient, in place, the component along a clipped input.

    dx <- f dx - u (u^T f dx),   u = x / |x| if the input was clipped, else 0;   f = 1 / nu or 1

An example that fits into one program is read once. A longer one is read twice, by few programs at a time, so that the
second read mostly hits the cache. Rows without a change (f = 1, not clipped) are not accessed.

Legend: B examples, [K, R] entries of each, E of them in a tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.kernels import launch
from clipwise.kernels.launch import Pointer, constexpr, device_of, jit, power_of_two, tl

_HELD, _ENTRIES_A_WARP = 8192, 1024  # entries that one program holds, and entries per warp
_TILE, _WARPS = 8192, 16  # for longer examples
_PROGRAMS = 528  # for longer examples: four on each multiprocessor of a large GPU


def to_tangent_(dx_BKR: Tensor, x_BKR: Tensor, norm_B: Tensor, scale_B: Tensor, nu_B: Tensor | None = None) -> Tensor:
    """In place. An input was clipped if 0 < `scale_B` < 1, and |x| is `norm_B`. Without `nu_B`, f is 1."""
    rows = launch.rows_of(dx_BKR, x_BKR) if launch.fits_float32(dx_BKR, x_BKR) else None
    if rows is None:
        return to_tangent_in_torch_(dx_BKR, x_BKR, norm_B, scale_B, nu_B)
    B, tile, is_held = len(dx_BKR), power_of_two(rows.length), rows.length <= _HELD
    with device_of(dx_BKR):
        _write_tangent[(B if is_held else min(B, _PROGRAMS),)](
            dx_BKR, x_BKR, norm_B, scale_B, norm_B if nu_B is None else nu_B, B, rows.length,
            dx_BKR.stride(0), x_BKR.stride(0),
            RESTORED=nu_B is not None, IS_HELD=is_held, TILE=tile if is_held else _TILE,
            num_warps=max(2, tile // _ENTRIES_A_WARP) if is_held else _WARPS,
        )  # fmt: skip
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
    dx: Pointer, x: Pointer, norm_B: Pointer, scale_B: Pointer, nu_B: Pointer,
    B: int, length: int, dx_B: int, x_B: int,
    RESTORED: constexpr, IS_HELD: constexpr, TILE: constexpr,
) -> None:  # fmt: skip
    for example in range(tl.program_id(0), B, tl.num_programs(0)):
        b = tl.zeros([], tl.int64) + example
        scale = tl.load(scale_B + b)
        inverse = tl.where(scale > 0.0, 1.0 / tl.load(norm_B + b), 0.0)
        inverse = tl.where(scale < 1.0, inverse, 0.0).to(tl.float32)
        # A limit of 0 masks the entries that are not read or changed.
        clipped = tl.where(inverse > 0.0, length, 0)
        changed = clipped
        factor = tl.full([], 1.0, tl.float32)
        if RESTORED:
            nu = tl.load(nu_B + b)
            factor = tl.where(nu > 0.0, 1.0 / nu, 0.0).to(tl.float32)
            changed = tl.where(factor != 1.0, length, clipped)
        at_dx_E = dx + b * dx_B + tl.arange(0, TILE)
        at_x_E = x + b * x_B + tl.arange(0, TILE)
        e_E = tl.arange(0, TILE)
        if IS_HELD:
            dx_E = tl.load(at_dx_E, mask=e_E < changed, other=0.0).to(tl.float32) * factor
            unit_E = tl.load(at_x_E, mask=e_E < clipped, other=0.0).to(tl.float32) * inverse
            along = tl.sum(tl.where(e_E < clipped, unit_E * dx_E, 0.0), axis=0)
            tl.store(at_dx_E, dx_E - unit_E * along, mask=e_E < changed)
        else:
            product_E = tl.zeros([TILE], tl.float32)
            for e in range(0, clipped, TILE):
                is_clipped_E = e_E < clipped - e
                dx_E = tl.load(at_dx_E + e, mask=is_clipped_E, other=0.0).to(tl.float32) * factor
                unit_E = tl.load(at_x_E + e, mask=is_clipped_E, other=0.0).to(tl.float32) * inverse
                product_E += unit_E * dx_E
            along = tl.sum(product_E, axis=0)
            for e in range(0, changed, TILE):
                is_changed_E = e_E < changed - e
                dx_E = tl.load(at_dx_E + e, mask=is_changed_E, other=0.0).to(tl.float32) * factor
                unit_E = tl.load(at_x_E + e, mask=e_E < clipped - e, other=0.0).to(tl.float32) * inverse
                tl.store(at_dx_E + e, dx_E - unit_E * along, mask=is_changed_E)
