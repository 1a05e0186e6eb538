"""Scale and shift of LayerNorm and GroupNorm.

Both gradients are vectors: each example's is written, and clipped on its exact norm. So no bound on the input is
needed, the input is not clipped, and what is passed on is what came.

    dgamma_i = sum_p g_ip x_ip,  dbeta_i = sum_p g_ip      x the normalized input, p positions
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from clipwise.kernels.measures import measures
from clipwise.layers.clipped import switch
from clipwise.layers.clipped.layer import ClippedLayer, Role, is_plain
from clipwise.layers.clipped.scales import Constants, cleaned, fits, lengths, weighted_rows


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, role: Role) -> Tensor:
        ctx.role, ctx.examples, ctx.axis = role, len(x), 0
        layer = role.layer.layer
        ctx.shape, ctx.dtype = list(layer.normalized_shape), x.dtype  # type: ignore[arg-type]
        ctx.together = math.prod(ctx.shape)  # numbers that have a mean and a variance
        y, mean, rstd = torch.native_layer_norm(x, ctx.shape, weight, bias, layer.eps)  # type: ignore[arg-type]
        ctx.save_for_backward(x, mean, rstd, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        g, x, mean, rstd, weight = _arrived(ctx, g)
        dx = None
        if ctx.needs_input_grad[0]:
            dx, _, _ = torch.ops.aten.native_layer_norm_backward(
                g, x, ctx.shape, mean, rstd, weight, None, [True, False, False]
            )
        rows = (len(g), x[:1].numel() // max(1, math.prod(ctx.shape)), math.prod(ctx.shape))
        dw = db = None
        if ctx.needs_input_grad[1]:
            terms = (x - mean).mul_(rstd).mul_(g).reshape(rows)
            dw = _summed(*_sum_and_mass(terms.mT), ctx.role.constants).view(ctx.shape)
        if ctx.needs_input_grad[2]:
            db = _summed(*_sum_and_mass(g.reshape(rows).mT), ctx.role.constants).view(ctx.shape)
        return (None if dx is None else dx.to(ctx.dtype)), dw, db, None


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, role: Role) -> Tensor:
        ctx.role, ctx.examples, ctx.axis = role, len(x), 0
        layer = role.layer.layer
        ctx.groups, ctx.dtype = layer.num_groups, x.dtype
        x = x.contiguous()
        B, c, p = len(x), x.shape[1], math.prod(x.shape[2:])
        ctx.together = c // ctx.groups * p
        y, mean, rstd = torch.native_group_norm(x, weight, bias, B, c, p, ctx.groups, layer.eps)  # type: ignore[arg-type]
        ctx.save_for_backward(x, mean, rstd, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        g, x, mean, rstd, weight = _arrived(ctx, g)
        B, c, p = len(x), x.shape[1], math.prod(x.shape[2:])
        dx = None
        if ctx.needs_input_grad[0]:
            dx, _, _ = torch.ops.aten.native_group_norm_backward(
                g.contiguous(), x, mean, rstd, weight, B, c, p, ctx.groups, [True, False, False]
            )
        dw = db = None
        shift_Bc, mass_Bc = _sum_and_mass(g.reshape(B, c, p))
        if ctx.needs_input_grad[1]:
            # sum_p g (x - mean) rstd, without writing the normalized input.
            sum_Bc, sizes_Bc = _sum_and_mass((g * x).reshape(B, c, p))
            of_channels = (B, ctx.groups, c // ctx.groups)
            mean_Bc, rstd_Bc = (t.view(B, -1, 1).expand(of_channels).reshape(B, c) for t in (mean, rstd))
            scale_Bc = (sum_Bc - mean_Bc * shift_Bc) * rstd_Bc
            mass_of_scale_Bc = (sizes_Bc + mean_Bc.abs() * mass_Bc) * rstd_Bc
            dw = _summed(scale_Bc, mass_of_scale_Bc, ctx.role.constants)
        if ctx.needs_input_grad[2]:
            db = _summed(shift_Bc, mass_Bc, ctx.role.constants)
        return (None if dx is None else dx.to(ctx.dtype)), dw, db, None


def _arrived(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What came back and what was kept on the way there, with 0 for examples that are not finite.

    Under autocast they may be in bfloat16: sums are formed in the type of the weights.
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


def _summed(rows: Tensor, mass: Tensor, constants: Constants) -> Tensor:
    clips = switch.is_clipping()
    return weighted_rows(rows.flatten(1), mass.flatten(1), constants, clips)


class _ClippedNorm(ClippedLayer):
    """A normalization with scale and shift clipped: each gradient is at most C2 an example."""

    function: ClassVar[type[torch.autograd.Function]]

    def _take(self, constants: Constants) -> None:
        self._role = Role(self, constants)

    def bounds(self) -> Mapping[str, float]:
        return {"weight": self.constants.grad_norm, "bias": self.constants.grad_norm}

    def forward(self, x: Tensor) -> Tensor:
        """Examples along the first axis, to the same shape."""
        x = self.require_examples(x, least=self.least_dimensions())
        if is_plain():
            y: Tensor = self.layer(x)
            return y
        z: Tensor = self.function.apply(x, self.layer.weight, self.layer.bias, self._role)  # type: ignore[no-untyped-call]
        return z

    @abstractmethod
    def least_dimensions(self) -> int:
        """Of an input, with the axis of examples."""


class ClippedLayerNorm(_ClippedNorm):
    """`nn.LayerNorm`, with scale and shift clipped: (B, ..., *normalized_shape) to the same shape."""

    layer: nn.LayerNorm
    function = _LayerNorm

    def least_dimensions(self) -> int:
        return 1 + len(self.layer.normalized_shape)


class ClippedGroupNorm(_ClippedNorm):
    """`nn.GroupNorm`, with scale and shift clipped: (B, c, ...) to the same shape."""

    layer: nn.GroupNorm
    function = _GroupNorm

    def least_dimensions(self) -> int:
        return 2
