"""A clipped linear map z = W x, a matrix or a convolution, as one node of the graph.

    forward    z_i = s_i W x_i + b,           s_i = min(1, C1 / |x_i|)
    backward   h_i = s_i nu_i g_i             g_i the upstream gradient, nu_i from a bound on the weights' gradient
               dW  = sum_i h_i x_i^T          at most C1 C2 per example
               db  = sum_i nu'_i sum_p g_ip   at most C2 per example, by its exact norm
               dx_i = (I - u_i u_i^T) W^T h_i u_i = x_i / |x_i| where the input was clipped, else 0

The map is linear, so the input is clipped by scaling the *output*: the clipped input is never stored, and the node
saves the input that the previous layer saves anyway (or the padded input, as torch does).

Weights and bias have separate clips. In mode "clip" the gradient passed to the previous layer includes the weights'
clip. In mode "normalize" it is h / nu, without that scale: otherwise parallel branches would add gradients of unrelated
scales. Each layer bounds its own gradient, so either choice is sound.

Where `fits` is True, Triton kernels read each tensor once: z <- s z + b and dx <- (I - u u^T) dx / nu in place, and the
sums over positions of g in one pass. Elsewhere torch operations compute the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from clipwise.gradients.blocks import Scratch
from clipwise.gradients.forms import chunks
from clipwise.kernels.factors import Norms, input_factors
from clipwise.kernels.measures import measures
from clipwise.kernels.scaled import scaled
from clipwise.kernels.squares import row_squares
from clipwise.kernels.tangent import to_tangent_
from clipwise.kernels.weighted import weighted_sum
from clipwise.layers.clipped import switch
from clipwise.layers.clipped.layer import (
    LIMITS,
    OneInputLayer,
    Role,
    along,
    at_least_shortest,
    cleaned,
    clipped_input,
    fits,
    input_scales,
    kernel_scales,
    lengths,
    upstream_scales,
    weighted_rows,
)

_TOGETHER = 2**20  # bytes of unit vectors per chunk: they fit in a cache
_scratch = Scratch(most_bytes=256 * 2**20)  # for scaled gradients, reused by all layers


class Map(ABC):
    """A map that is linear in its input and in its weights. Inputs are [B, ...]; outputs have c channels."""

    def seen(self, x: Tensor) -> Tensor:
        """The input, or a zero-padded copy of it. This tensor is saved for the backward pass."""
        return x

    def of_input(self, seen: Tensor) -> Tensor:
        """The part of `seen` that is the input."""
        return seen

    @abstractmethod
    def forward(self, seen: Tensor, weight: Tensor) -> Tensor:
        """W x, a new tensor."""

    @abstractmethod
    def pull_back(
        self, h: Tensor, seen: Tensor, weight: Tensor, of_input: bool, of_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """W^T h, in the layout of `seen`, and sum_i h_i x_i^T."""

    def upstream_norm(self, g: Tensor, mass_Bc: Tensor | None, x_shape: torch.Size) -> Tensor:
        """n_i with |dW_i| <= |x_i| n_i, [B]. `mass_Bc` is sum_p |g_cp|, if there are positions."""
        a, b = self.upstream_times(x_shape)
        norm_B = b * lengths(g)
        return norm_B if a is None or mass_Bc is None else torch.minimum(a * lengths(mass_Bc), norm_B)

    def upstream_times(self, x_shape: torch.Size) -> tuple[float | None, float]:
        """a and b with n_i = min(a |mass_i|, b |g_i|); a is None if only |g_i| is used."""
        return None, 1.0

    @abstractmethod
    def squares(self, x: Tensor) -> Tensor:
        """Squares of the input, summed over each group of channels: [B, G, ...] in float64."""

    @abstractmethod
    def window_lengths(self, squares: Tensor) -> Tensor:
        """From `squares`, the norm of the window of each output position and group of channels: [B, G, P]."""

    @abstractmethod
    def channels(self, z: Tensor) -> Tensor:
        """Outputs, or their gradients, as [B, c, P]; a view if possible."""

    def gradient_norm(self, sizes: Tensor, lengths_BGP: Tensor) -> Tensor:
        """n_i = |(sum_p l_ip |g_icp|)_c| >= |dW_i|, [B]; never above |x_i| times `upstream_norm`.

        `sizes` is |g|, and is overwritten.
        """
        (B, G, _), sizes_BcP = lengths_BGP.shape, self.channels(sizes)
        sizes_BGcP = sizes_BcP.view(B, G, sizes_BcP.shape[1] // G, -1)
        return lengths(sizes_BGcP.mul_(lengths_BGP.to(sizes.dtype).unsqueeze(2)).sum(-1))

    def over_positions(self, g: Tensor) -> Tensor:
        """sum_p g_p of each output channel: [B, c]."""
        return self.channels(g).sum(2) if g.dim() > 2 else g

    @abstractmethod
    def bias_view(self, bias: Tensor, z: Tensor) -> Tensor:
        """The bias, broadcastable to the output."""


@dataclass(frozen=True)
class MapRole(Role):
    """A role with the map that the node computes."""

    map: Map = field(kw_only=True)


class Seen(NamedTuple):
    """What a node saves of its input: the input (or the padded one), |x|, s, and the norms of the windows."""

    x: Tensor
    norm_B: Tensor
    scale_B: Tensor
    lengths_BGP: Tensor | None


class ClippedMap(torch.autograd.Function):
    """The autograd function; see above."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, role: MapRole) -> Tensor:
        ctx.role, ctx.examples, ctx.axis, ctx.x_shape = role, len(x), 0, x.shape
        seen = looked_at(x, role, weight.requires_grad)
        z = mapped(seen, weight, bias, role)
        ctx.is_clean = seen.x is not x  # a copy, which may be changed
        if ctx.is_clean:
            seen = seen._replace(x=_cleared(seen.x, seen.scale_B))
        ctx.save_for_backward(*seen, weight)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        role: MapRole = ctx.role
        *kept, weight = ctx.saved_tensors
        seen = Seen(*kept)
        _, needs_w, needs_b, _ = ctx.needs_input_grad
        needs_x = switch.goes_on(ctx)
        switch.saw(ctx, g)
        # Under autocast the gradient may be bfloat16: sums use the dtype of the weights.
        g = g.to(weight.dtype)
        factors_of = _upstream_factors_by_kernels if fits(g) else _upstream_factors
        nu_B, db = factors_of(role, g, ctx.x_shape, seen, switch.is_clipping() and needs_w, needs_b)
        dx, dw = pulled_back(role, g, seen, weight, nu_B, needs_x, needs_w, ctx.is_clean)
        if not needs_x:  # the first layer ends the backward pass: free the memory for the next forward pass
            _scratch.clear()
        return dx, dw, db, None


class ClippedMapLayer(OneInputLayer):
    """A layer that is one map. The weights' gradient is at most C1 C2 per example, the bias's at most C2."""

    layer: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
    _role: MapRole

    def bounds(self) -> Mapping[str, float]:
        return {"weight": self.constants.weight_norm, "bias": self.constants.grad_norm}

    def _plain(self, x: Tensor) -> Tensor:
        return super()._plain(clipped_input(x, self.constants.input_norm))

    def _clipped(self, x: Tensor) -> Tensor:
        z: Tensor = ClippedMap.apply(x, self.layer.weight, self.layer.bias, self._role)  # type: ignore[no-untyped-call]
        return z


def looked_at(x: Tensor, role: MapRole, is_trained: bool) -> Seen:
    """The input with |x| and s per example, and the norms of its windows."""
    c = role.constants
    squares = role.map.squares(x) if c.bound == "gradient" and is_trained and len(x) > 0 else None
    if fits(x):
        square_B = row_squares(x.reshape(len(x), -1)) if squares is None else squares.flatten(1).sum(1)
        norm_B, scale_B = input_factors(square_B, c.input_norm, LIMITS)
        switch.noted(scale_B)
    else:
        norm_B = lengths(x) if squares is None else squares.flatten(1).sum(1).sqrt()
        scale_B = input_scales(norm_B, c.input_norm)
    lengths_BGP = None if squares is None else role.map.window_lengths(squares)
    if lengths_BGP is not None:
        at_least_shortest(lengths_BGP, c.weight_norm)
    return Seen(role.map.seen(x), norm_B, scale_B, lengths_BGP)


def mapped(seen: Seen, weight: Tensor, bias: Tensor | None, role: MapRole) -> Tensor:
    """z = s W x + b."""
    z = role.map.forward(seen.x, weight)
    if fits(z):
        z = z if _is_view(role.map.channels(z), z) else z.contiguous()
        scaled(role.map.channels(z), seen.scale_B, bias, out=role.map.channels(z))
        return z
    z = cleaned(z, seen.scale_B).mul_(along(seen.scale_B, z))
    return z if bias is None else z.add_(role.map.bias_view(bias.to(z.dtype), z))


def pulled_back(
    role: MapRole,
    g: Tensor,
    seen: Seen,
    weight: Tensor,
    nu_B: Tensor,
    needs_x: bool,
    needs_w: bool,
    is_clean: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """dx and dW, with h = s nu g. `is_clean`: examples that count as 0 are 0 in `seen` already."""
    if not (needs_x or needs_w):
        return None, None
    is_fused, total_B = fits(g), nu_B * seen.scale_B
    if is_fused:
        h = torch.empty_like(g)  # autograd owns g
        if not _is_view(role.map.channels(h), h):  # another memory format
            h = torch.empty_like(g, memory_format=torch.contiguous_format)
        scaled(role.map.channels(g), total_B, out=role.map.channels(h))
    else:
        h = torch.mul(cleaned(g, total_B), along(total_B, g), out=_scratch.like(g))
    x = seen.x.to(weight.dtype)
    x = x if is_clean or (is_fused and not needs_w) else cleaned(x, seen.scale_B)
    dx, dw = role.map.pull_back(h, x, weight, needs_x, needs_w)
    del h
    if dx is None:
        return None, dw
    mode = role.constants.mode
    if is_fused:
        dx = _with_entries_in_place(dx)
        to_tangent_(_entries(dx), _entries(x), seen.norm_B, seen.scale_B, nu_B if mode == "normalize" else None)
    else:
        dx = along_the_sphere(passed_on(dx, nu_B, mode), x, seen.norm_B, seen.scale_B)
    return role.map.of_input(dx).to(seen.x.dtype), dw


def _upstream_factors(
    role: MapRole, g: Tensor, x_shape: torch.Size, seen: Seen, clips_weights: bool, needs_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """nu, which bounds each example's part of dW by C1 C2; and the clipped gradient of the bias."""
    of, c = role.map, role.constants
    by_windows = clips_weights and seen.lengths_BGP is not None
    has_mass = g.dim() > 2 and (needs_bias or (clips_weights and not by_windows))
    # Reuse memory: an allocation costs more than the operation.
    sizes = torch.abs(g, out=_scratch.like(g)) if has_mass or by_windows else None
    mass_Bc = of.over_positions(sizes) if sizes is not None and has_mass else None
    db = weighted_rows(of.over_positions(g), mass_Bc, c) if needs_bias else None
    if not clips_weights:
        nu_B = upstream_scales(lengths(g), None, c.most)
    elif seen.lengths_BGP is None:
        nu_B = upstream_scales(of.upstream_norm(g, mass_Bc, x_shape), c.grad_norm, c.most)
    else:
        assert sizes is not None
        # Lengths are those of the unclipped input.
        norm_B = of.gradient_norm(sizes, seen.lengths_BGP) * seen.scale_B
        nu_B = upstream_scales(norm_B, c.weight_norm, c.most)
    return nu_B, db


def _upstream_factors_by_kernels(
    role: MapRole, g: Tensor, x_shape: torch.Size, seen: Seen, clips_weights: bool, needs_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """`_upstream_factors` by kernels, from one read of g."""
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


def passed_on(dx: Tensor, nu_B: Tensor, mode: str) -> Tensor:
    """The gradient for the previous layer: with the weights' clip in mode "clip", without it in mode "normalize"."""
    return dx if mode == "clip" else dx.mul_(along(torch.where(nu_B > 0, 1 / nu_B, 0.0), dx))


def along_the_sphere(dx: Tensor, x: Tensor, norm_B: Tensor, scale_B: Tensor) -> Tensor:
    """Where the input was clipped, remove the component along it: s x keeps its norm C1 when x grows."""
    clipped_B = (scale_B < 1) & (scale_B > 0)
    if surely_none(clipped_B):
        return dx
    inverse_B = torch.where(clipped_B, 1 / norm_B, 0.0)
    each = x.shape[1:].numel() * x.element_size()
    for some in chunks(len(x), each, _TOGETHER) if x.device.type == "cpu" else [slice(None)]:
        unit = x[some] * along(inverse_B[some], x)
        along_B = torch.linalg.vecdot(unit.flatten(1), dx[some].flatten(1))
        dx[some].addcmul_(unit, along(along_B, dx), value=-1)
    return dx


def surely_none(flags_B: Tensor) -> bool:
    """Whether no flag is set; False on a GPU, where reading the flags would synchronize."""
    return not flags_B.is_cuda and not bool(flags_B.any())


def _cleared(t: Tensor, factor_B: Tensor) -> Tensor:
    """`cleaned` for a copy, which kernels change in place."""
    if not fits(t):
        return cleaned(t, factor_B)
    if switch.noted(factor_B):
        return t
    t = _with_entries_in_place(t)
    scaled(_entries(t), (factor_B > 0).double(), out=_entries(t))
    return t


def _entries(t: Tensor) -> Tensor:
    return t.unsqueeze(1) if t.dim() == 2 else t.flatten(2)


def _with_entries_in_place(t: Tensor) -> Tensor:
    """The tensor, or a contiguous copy for which `_entries` is a view."""
    return t if _is_view(_entries(t), t) else t.contiguous()


def _is_view(view: Tensor, t: Tensor) -> bool:
    return view.data_ptr() == t.data_ptr()
