"""Triton kernels for clipped linear maps: each pass reads its tensor once.

If `layer.fits` is False (on a CPU, in float64, without Triton), linear_map.py does the same with torch operations.

    forward    |x|^2                       one read of x (or of squares per pixel, where these are needed anyway)
               z <- s z + b                in place
    backward   sums over positions of g    one read of g
               h = s nu g                  one read and one write: autograd owns g
               dx <- (I - u u^T) dx / nu   in place
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clipwise.kernels.factors import Norms, input_factors
from clipwise.kernels.measures import measures
from clipwise.kernels.scaled import scaled
from clipwise.kernels.squares import row_squares
from clipwise.kernels.tangent import to_tangent_
from clipwise.kernels.weighted import weighted_sum
from clipwise.layers.clipped import switch
from clipwise.layers.clipped.layer import LIMITS, kernel_scales, weighted_rows

if TYPE_CHECKING:
    from clipwise.layers.clipped.linear_map import Map, MapRole, Seen


def input_scales_of(x: Tensor, squares_BGP: Tensor | None, input_norm: float) -> tuple[Tensor, Tensor]:
    """|x| and s of each example. Records s for a compiled step."""
    square_B = row_squares(x.reshape(len(x), -1)) if squares_BGP is None else squares_BGP.flatten(1).sum(1)
    norm_B, scale_B = input_factors(square_B, input_norm, LIMITS)
    switch.noted(scale_B)
    return norm_B, scale_B


def scaled_output(of: Map, z: Tensor, scale_B: Tensor, bias: Tensor | None) -> Tensor:
    """s z + b, in place: z is new."""
    z = z if _is_view(of.channels(z), z) else z.contiguous()
    scaled(of.channels(z), scale_B, bias, out=of.channels(z))
    return z


def cleared(t: Tensor, factor_B: Tensor) -> Tensor:
    """Set rows with factor 0 to 0, in place: `t` is a copy."""
    if switch.noted(factor_B):
        return t
    t = _with_entries_in_place(t)
    scaled(_entries(t), (factor_B > 0).double(), out=_entries(t))
    return t


def upstream_factors(
    role: MapRole, g: Tensor, x_shape: torch.Size, seen: Seen, clips_weights: bool, needs_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """nu of the weights' gradient, and the clipped gradient of the bias; formulas as in linear_map.py."""
    of, c, lengths_BGP = role.map, role.constants, seen.lengths_BGP if clips_weights else None
    g_BKR, by_windows, has_positions = of.channels(g), lengths_BGP is not None, g.dim() > 2
    if not has_positions:
        rows_BK = g_BKR[..., 0]
        times_B = None if lengths_BGP is None else seen.scale_B * lengths_BGP[:, 0, 0]
        norms, mass_BK = Norms(rows_BK, times=times_B), None
    else:
        most, cover = of.upstream_times(x_shape)
        has_mass = clips_weights and not by_windows and most is not None
        found = measures(g_BKR, lengths_BGP, total=needs_bias, mass=needs_bias or has_mass, square=not by_windows)
        if by_windows:
            norms = Norms(found.weighted, times=seen.scale_B)
        else:
            first, a = (found.mass, most) if has_mass and most is not None else (None, 1.0)
            norms = Norms(first, found.square, True, first_times=a, second_times=cover)
        rows_BK = found.total if found.total is not None else g_BKR[..., 0]
        mass_BK = found.mass
    bound = None
    if clips_weights:
        bound = c.weight_norm if by_windows else c.grad_norm
    nu_B = kernel_scales(norms, bound, c.most)
    if not needs_bias:
        return nu_B, None
    if clips_weights and not by_windows and not has_positions:  # the same norm and the same bound
        return nu_B, weighted_sum(rows_BK, nu_B)
    return nu_B, weighted_rows(rows_BK, mass_BK, c)


def scaled_gradient(of: Map, g: Tensor, factor_B: Tensor) -> Tensor:
    """f g, a new tensor."""
    h = torch.empty_like(g)
    if not _is_view(of.channels(h), h):  # another memory format
        h = torch.empty_like(g, memory_format=torch.contiguous_format)
    scaled(of.channels(g), factor_B, out=of.channels(h))
    return h


def along_the_sphere(dx: Tensor, x: Tensor, norm_B: Tensor, scale_B: Tensor, nu_B: Tensor | None) -> Tensor:
    """dx without the component along a clipped input, divided by nu if given; in place: dx is new."""
    dx = _with_entries_in_place(dx)
    to_tangent_(_entries(dx), _entries(x), norm_B, scale_B, nu_B)
    return dx


def _entries(t: Tensor) -> Tensor:
    return t.unsqueeze(1) if t.dim() == 2 else t.flatten(2)


def _with_entries_in_place(t: Tensor) -> Tensor:
    """The tensor, or a contiguous copy for which `_entries` is a view."""
    return t if _is_view(_entries(t), t) else t.contiguous()


def _is_view(view: Tensor, t: Tensor) -> bool:
    return view.data_ptr() == t.data_ptr()
