"""Clipped scale and shift of LayerNorm and GroupNorm, and clipped embeddings: layers whose input is not clipped.

Each example's gradient is a vector, which is formed and clipped by its exact norm. This needs no bound on the input, so
the input is not clipped, and the gradient of the input is not changed.

    dgamma_i = sum_p g_ip x_ip,  dbeta_i = sum_p g_ip      x the normalized input, p positions

Ids of an embedding have no norm to clip either, so its bound uses the upstream gradient alone. The gradient of row v of
the table is the sum of g_t over the positions t with id v. With `most` the count of an example's most frequent id
(positions with a zero gradient, such as padding, do not count),

    |dW| <= |(sum_t |g_tc|)_c|        per channel, for any ids
    |dW| <= sqrt(most) |g|            per row, by Cauchy's inequality

and the smaller bound is clipped to C2. It is exact if no id repeats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from clipwise.gradients.forms import at_least_float32
from clipwise.kernels.measures import measures
from clipwise.layers.clipped import switch
from clipwise.layers.clipped.layer import (
    ClipConstants,
    OneInputLayer,
    Role,
    cleaned,
    fits,
    lengths,
    scaled,
    upstream_scales,
    weighted_rows,
)


def _noted(ctx: Any, x: Tensor, role: Role) -> Any:
    """Note on the node what every clipped layer's node has; returns the wrapped layer."""
    ctx.role, ctx.examples, ctx.axis, ctx.dtype = role, len(x), 0, x.dtype
    return role.layer.layer


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, role: Role) -> Tensor:
        layer = _noted(ctx, x, role)
        ctx.shape, ctx.together = list(layer.normalized_shape), math.prod(layer.normalized_shape)
        y, mean, rstd = torch.native_layer_norm(x, ctx.shape, weight, bias, layer.eps)
        ctx.save_for_backward(x, mean, rstd, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        g, x, mean, rstd, weight = _arrived(ctx, g)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx, _, _ = torch.ops.aten.native_layer_norm_backward(
                g, x, ctx.shape, mean, rstd, weight, None, [True, False, False]
            )
            dx = dx.to(ctx.dtype)
        rows = (len(g), x[:1].numel() // max(1, ctx.together), ctx.together)
        if ctx.needs_input_grad[1]:
            terms = (x - mean).mul_(rstd).mul_(g).reshape(rows)
            dw = weighted_rows(*_sum_and_mass(terms.mT), ctx.role.constants).view(ctx.shape)
        if ctx.needs_input_grad[2]:
            db = weighted_rows(*_sum_and_mass(g.reshape(rows).mT), ctx.role.constants).view(ctx.shape)
        return dx, dw, db, None


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, role: Role) -> Tensor:
        layer = _noted(ctx, x, role)
        x = x.contiguous()
        B, c, p = ctx.sizes = len(x), x.shape[1], math.prod(x.shape[2:])
        ctx.groups, ctx.together = layer.num_groups, c // layer.num_groups * p
        y, mean, rstd = torch.native_group_norm(x, weight, bias, B, c, p, ctx.groups, layer.eps)
        ctx.save_for_backward(x, mean, rstd, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        g, x, mean, rstd, weight = _arrived(ctx, g)
        B, c, p = ctx.sizes
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx, _, _ = torch.ops.aten.native_group_norm_backward(
                g.contiguous(), x, mean, rstd, weight, B, c, p, ctx.groups, [True, False, False]
            )
            dx = dx.to(ctx.dtype)
        shift_Bc, mass_Bc = _sum_and_mass(g.reshape(B, c, p))
        if ctx.needs_input_grad[1]:
            # sum_p g (x - mean) rstd, without forming the normalized input.
            sum_Bc, sizes_Bc = _sum_and_mass((g * x).reshape(B, c, p))
            of_channels = (B, ctx.groups, c // ctx.groups)
            mean_Bc, rstd_Bc = (t.view(B, -1, 1).expand(of_channels).reshape(B, c) for t in (mean, rstd))
            scale_Bc = (sum_Bc - mean_Bc * shift_Bc) * rstd_Bc
            mass_of_scale_Bc = (sizes_Bc + mean_Bc.abs() * mass_Bc) * rstd_Bc
            dw = weighted_rows(scale_Bc, mass_of_scale_Bc, ctx.role.constants)
        if ctx.needs_input_grad[2]:
            db = weighted_rows(shift_Bc, mass_Bc, ctx.role.constants)
        return dx, dw, db, None


def _arrived(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradient and the saved tensors, with 0 for examples that are not finite.

    Under autocast they may be bfloat16: sums use the dtype of the weights.
    """
    switch.saw(ctx, g)
    x, mean, rstd, weight = ctx.saved_tensors
    counts_B = torch.isfinite(lengths(g)) & torch.isfinite(lengths(x))
    g, x, mean, rstd = (cleaned(t.to(weight.dtype), counts_B) for t in (g, x, mean, rstd))
    return g, x, mean, rstd, weight


def _sum_and_mass(terms_BnR: Tensor) -> tuple[Tensor, Tensor]:
    """sum_r t_r and sum_r |t_r|, [B, n] each."""
    if fits(terms_BnR):
        found = measures(terms_BnR, total=True, mass=True)
        assert found.total is not None and found.mass is not None
        return found.total, found.mass
    return terms_BnR.sum(2), terms_BnR.abs().sum(2)


class _ClippedNorm(OneInputLayer):
    """A normalization layer whose scale and shift gradients are at most C2 per example."""

    function: ClassVar[type[torch.autograd.Function]]

    def bounds(self) -> Mapping[str, float]:
        return {"weight": self.constants.grad_norm, "bias": self.constants.grad_norm}

    def _clipped(self, x: Tensor) -> Tensor:
        z: Tensor = self.function.apply(x, self.layer.weight, self.layer.bias, self._role)  # type: ignore[no-untyped-call]
        return z


class ClippedLayerNorm(_ClippedNorm):
    """`nn.LayerNorm`, with scale and shift clipped: (B, ..., *normalized_shape) to the same shape."""

    layer: nn.LayerNorm
    function = _LayerNorm

    @property
    def least_dimensions(self) -> int:
        return 1 + len(self.layer.normalized_shape)


class ClippedGroupNorm(_ClippedNorm):
    """`nn.GroupNorm`, with scale and shift clipped: (B, c, ...) to the same shape."""

    layer: nn.GroupNorm
    function = _GroupNorm


class ClippedLookup(torch.autograd.Function):
    """Rows of a table; see above."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int, role: Role) -> Tensor:
        ctx.role, ctx.examples, ctx.axis, ctx.padding, ctx.rows = role, len(ids), 0, padding, len(weight)
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor, None, None]:
        switch.saw(ctx, g)
        (ids,) = ctx.saved_tensors
        c = ctx.role.constants
        ids_BT = ids.reshape(len(ids), -1)
        g_BTd = at_least_float32(g).reshape(len(g), ids[:1].numel(), g.shape[-1])
        if ctx.padding >= 0:
            g_BTd = g_BTd.masked_fill((ids_BT == ctx.padding).unsqueeze(-1), 0)
        norm_B = lookup_norm(ids_BT, g_BTd)
        nu_B = upstream_scales(norm_B, c.grad_norm if switch.is_clipping() else None, c.most)
        h_BTd = scaled(g_BTd, nu_B)
        table = h_BTd.new_zeros(ctx.rows, g.shape[-1])
        return None, table.index_add_(0, ids_BT.flatten(), h_BTd.flatten(0, 1)), None, None


def lookup_norm(ids_BT: Tensor, g_BTd: Tensor) -> Tensor:
    """An upper bound on the norm of each example's gradient of the table, [B]."""
    if ids_BT.shape[1] == 0:
        return torch.zeros(len(ids_BT), dtype=torch.float64, device=ids_BT.device)
    by_sums_B = lengths(g_BTd.abs().sum(1))
    # Positions with a zero gradient get unique ids.
    own_T = -1 - torch.arange(ids_BT.shape[1], device=ids_BT.device)
    ids_BT = torch.where((g_BTd != 0).any(2), ids_BT, own_T)
    most_B = (ids_BT == ids_BT.mode(1, keepdim=True).values).sum(1)
    return torch.minimum(by_sums_B, most_B.sqrt() * lengths(g_BTd))


class ClippedEmbedding(OneInputLayer):
    """`nn.Embedding`, clipped: the gradient of the table is at most C2 per example."""

    layer: nn.Embedding

    def __init__(self, layer: nn.Embedding, constants: ClipConstants, uses: int = 1, name: str = "") -> None:
        super().__init__(layer, constants, uses, name)
        options = ("max_norm", "scale_grad_by_freq", "sparse")
        self.refuse_if(**{option: (getattr(layer, option), "build it without") for option in options})

    def bounds(self) -> Mapping[str, float]:
        return {"weight": self.constants.grad_norm}

    @property
    def least_dimensions(self) -> int:
        return 1

    def _clipped(self, x: Tensor) -> Tensor:
        """Map ids (B, ...) to (B, ..., d)."""
        padding = -1 if self.layer.padding_idx is None else self.layer.padding_idx  # -1: none
        z: Tensor = ClippedLookup.apply(x, self.layer.weight, padding, self._role)  # type: ignore[no-untyped-call]
        return z
