"""Multi-head attention with one clip for queries, keys and values and another for the output projection.

Queries, keys and values are three maps of one weight tensor:

    q_i, k_i, v_i   = s W_q x_i + b_q, ...       each input clipped to C1, as in linear_map.py
    n_i^2           = the sum over the three maps of their squared gradient bounds (or, without the input, |g|^2)
    h_i             = s nu_i g_i                 one nu_i for all three

so the gradient of the weight tensor is at most C1 C2 per example, and that of the bias at most C2.

The three share one clip because the gradients of queries and keys are differences that may cancel. If all positions of
a record are equal, only rounding error is left of them, which depends on the batch. mode="normalize" would scale this
error up to the bound if each map had its own clip. Next to the values' gradient it stays small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from clipwise.errors import ConfigurationError, UnsupportedModelError
from clipwise.kernels.factors import Norms
from clipwise.kernels.measures import measures
from clipwise.layers.clipped import switch
from clipwise.layers.clipped.layer import (
    ClipConstants,
    ClippedLayer,
    clipped_input,
    fits,
    is_plain,
    kernel_scales,
    upstream_scales,
    weighted_rows,
)
from clipwise.layers.clipped.linear import Matrix
from clipwise.layers.clipped.linear_map import ClippedMap, MapRole, Seen, looked_at, mapped, pulled_back

THIRDS = 3


class ClippedProjections(torch.autograd.Function):
    """The autograd function; see above. Inputs are [B, T, d]; T may differ between queries and keys."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None, role: MapRole
    ) -> tuple[Tensor, ...]:
        ctx.role, ctx.examples, ctx.axis = role, len(query), 0
        seen: dict[int, Seen] = {}  # in self-attention the three inputs are one tensor
        for x in (query, key, value):
            if id(x) not in seen:
                seen[id(x)] = looked_at(x, role, weight.requires_grad)
        each = [seen[id(x)] for x in (query, key, value)]
        biases = [None] * THIRDS if bias is None else bias.chunk(THIRDS)
        ctx.save_for_backward(*(t for one in each for t in one), weight)
        return tuple(mapped(one, w, b, role) for one, w, b in zip(each, weight.chunk(THIRDS), biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        role: MapRole = ctx.role
        *kept, weight = ctx.saved_tensors
        size = len(Seen._fields)
        each = [Seen(*kept[k * size : (k + 1) * size]) for k in range(THIRDS)]
        *needs_inputs, needs_w, needs_b, _ = ctx.needs_input_grad
        switch.saw(ctx, *gradients)
        # Under autocast gradients may be bfloat16: sums use the dtype of the weights.
        gs = [g.to(weight.dtype) for g in gradients]
        nu_B, db = _projection_factors(role, gs, each, needs_w, needs_b)
        by_input = zip(gs, each, weight.chunk(THIRDS), needs_inputs, strict=True)
        found = [pulled_back(role, g, one, w, nu_B, needs_x, needs_w) for g, one, w, needs_x in by_input]
        dw = torch.cat([third for _, third in found if third is not None]) if needs_w else None
        return *(dx for dx, _ in found), dw, db, None


def _projection_factors(
    role: MapRole, gs: list[Tensor], each: list[Seen], needs_weight: bool, needs_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """nu, which bounds each example's part of dW by C1 C2; and the clipped gradient of the bias."""
    c = role.constants
    by_windows = each[0].lengths_BGP is not None
    found = [
        measures(role.map.channels(g), one.lengths_BGP, total=needs_bias, mass=needs_bias, square=not by_windows)
        for g, one in zip(gs, each, strict=True)
    ]
    weighted, squares, totals, masses = zip(*((m.weighted, m.square, m.total, m.mass) for m in found), strict=True)
    if by_windows:  # lengths of the unclipped inputs
        norms = Norms(_side_by_side(one.scale_B[:, None] * w for one, w in zip(each, weighted, strict=True)))
    else:
        norms = Norms(second=_side_by_side(squares), has_squares=True)
    bound = None
    if switch.is_clipping() and needs_weight:
        bound = c.weight_norm if by_windows else c.grad_norm
    nu_B = kernel_scales(norms, bound, c.most) if fits(gs[0]) else upstream_scales(norms.of_examples(), bound, c.most)
    if not needs_bias:
        return nu_B, None
    return nu_B, weighted_rows(_side_by_side(totals), _side_by_side(masses), c)


def _side_by_side(thirds: Iterable[Any]) -> Tensor:
    return torch.cat(list(thirds), 1)


class ClippedAttention(ClippedLayer):
    """`nn.MultiheadAttention` with `batch_first=True` and clipped projections."""

    layer: nn.MultiheadAttention
    batch_first = True
    # Keeps torch's encoder layers from their fast path, which reads the weights and skips this module.
    _qkv_same_embed_dim = False

    def __init__(self, layer: nn.MultiheadAttention, constants: ClipConstants, uses: int = 1, name: str = "") -> None:
        super().__init__(layer, constants, uses, name)
        self.refuse_if(
            kdim=(layer.kdim != layer.embed_dim, "leave it out"),
            vdim=(layer.vdim != layer.embed_dim, "leave it out"),
            add_bias_kv=(layer.bias_k is not None, "leave it out"),
            add_zero_attn=(layer.add_zero_attn, "leave it out"),
        )
        if not layer.batch_first:
            raise UnsupportedModelError(
                f"Layer {name!r} (MultiheadAttention) has positions in the first dimension: use batch_first=True."
            )

    def _take(self, constants: ClipConstants) -> None:
        self._in = MapRole(self, constants, "projections", map=Matrix())
        self._out = MapRole(self, constants, "output", map=Matrix())

    @property
    def in_proj_bias(self) -> Tensor | None:
        """Read by torch's encoder layers."""
        return self.layer.in_proj_bias

    def bounds(self) -> Mapping[str, float]:
        weight, bias = self.constants.weight_norm, self.constants.grad_norm
        maps = {"in_proj_weight": weight, "in_proj_bias": bias}
        return maps | {"out_proj.weight": weight, "out_proj.bias": bias}

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention` with `batch_first=True`: inputs are (B, T, d)."""
        layer = self.layer
        inputs = [self.require_examples(t, least=3) for t in (query, key, value)]
        q, k, v = (
            x.view(*x.shape[:2], layer.num_heads, layer.head_dim).transpose(1, 2) for x in self._projected(inputs)
        )
        if is_causal and attn_mask is None:  # is_causal is only a hint about the mask, as in torch
            raise ConfigurationError(f"Layer {self.name!r} got is_causal without attn_mask: give the mask as well.")
        mask = _joined(attn_mask, key_padding_mask, q, query.shape[0], layer.num_heads)
        dropout = layer.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            weights = (scores if mask is None else scores + mask).softmax(-1)
            mixed = F.dropout(weights, dropout) @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        mixed, out = mixed.transpose(1, 2).flatten(2), layer.out_proj
        if is_plain():
            return F.linear(clipped_input(mixed, self.constants.input_norm), out.weight, out.bias), weights
        return ClippedMap.apply(mixed, out.weight, out.bias, self._out), weights  # type: ignore[no-untyped-call]

    def _projected(self, inputs: list[Tensor]) -> Iterable[Tensor]:
        weight, bias = self.layer.in_proj_weight, self.layer.in_proj_bias
        if is_plain():
            biases = [None] * THIRDS if bias is None else bias.chunk(THIRDS)
            each = zip(inputs, weight.chunk(THIRDS), biases, strict=True)
            return [F.linear(clipped_input(x, self.constants.input_norm), w, b) for x, w, b in each]
        if len({len(x) for x in inputs}) > 1:
            raise ConfigurationError(
                f"Layer {self.name!r} got queries, keys and values of different numbers of examples: give each example "
                "its own, along the first axis."  # the numbers are secret
            )
        found: tuple[Tensor, ...] = ClippedProjections.apply(*inputs, weight, bias, self._in)  # type: ignore[no-untyped-call]
        return found


def _joined(mask: Tensor | None, padding: Tensor | None, like: Tensor, batch: int, heads: int) -> Tensor | None:
    """The sum of both masks as additive scores, [B or 1, heads or 1, T or 1, S]."""
    found = None
    if mask is not None:
        found = _added(mask, like)
        found = found.view(batch, heads, *found.shape[1:]) if found.dim() == 3 else found[None, None]
    if padding is not None:
        of_padding = _added(padding, like)[:, None, None]
        found = of_padding if found is None else found + of_padding
    return found


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """An additive mask. In a boolean mask, True excludes a position."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=mask.device).masked_fill(mask, -math.inf)
