"""Queries, keys and values of attention: three maps whose weights are one tensor, under one clip.

    q_i, k_i, v_i   = s W_q x_i + b_q, ...       each input clipped to C1 by itself, as in maps.py
    n_i^2           = sum over the three of what bounds each one's gradient (or, without the input, |g|^2)
    h_i             = s nu_i g_i                 one nu_i for all three

so that the gradient of the whole tensor is at most C1 C2 an example, that of the bias at most C2.

One clip, not three: the gradients of queries and keys are differences that may cancel. Where all positions of a record
are the same, nothing is left of them but rounding, which depends on the batch, and to "normalize" each by itself would
make it as long as any gradient. Beside the values' gradient it stays as short as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipwise.kernels.factors import Norms, gradient_factors
from clipwise.kernels.measures import measures
from clipwise.layers.clipped import switch
from clipwise.layers.clipped.maps import MapRole, Seen, looked_at, mapped, pulled_back
from clipwise.layers.clipped.scales import LIMITS, fits, upstream_scales, weighted_rows

THIRDS = 3


class ClippedProjections(torch.autograd.Function):
    """The node; see above. Inputs are [B, T, d], with a T for queries and another one for keys and values."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        role: MapRole,
    ) -> tuple[Tensor, ...]:
        ctx.role, ctx.examples, ctx.axis = role, len(query), 0
        seen: dict[int, Seen] = {}  # self-attention gives one input three times
        for x in (query, key, value):
            if id(x) not in seen:
                seen[id(x)] = looked_at(x, role, weight.requires_grad)
        each = [seen[id(x)] for x in (query, key, value)]
        biases = [None] * THIRDS if bias is None else bias.chunk(THIRDS)
        ctx.save_for_backward(*(t for one in each for t in one), weight)
        return tuple(
            mapped(one, w, b, role) for one, w, b in zip(each, weight.chunk(THIRDS), biases, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        role: MapRole = ctx.role
        *kept, weight = ctx.saved_tensors
        size = len(Seen._fields)
        each = [Seen(*kept[k * size : (k + 1) * size]) for k in range(THIRDS)]
        *needs_inputs, needs_w, needs_b, _ = ctx.needs_input_grad
        switch.saw(ctx, *gradients)
        # Under autocast they may come in bfloat16: sums are formed in the type of the weights.
        gs = [g.to(weight.dtype) for g in gradients]
        nu_B, db = _upstream_factors(role, gs, each, needs_w, needs_b)
        dw = torch.empty_like(weight) if needs_w else None
        passed = []
        for k, (g, one, w, needs_x) in enumerate(
            zip(gs, each, weight.chunk(THIRDS), needs_inputs, strict=True)
        ):
            dx, third = pulled_back(role, g, one, w, nu_B, needs_x, needs_w)
            passed.append(dx)
            if dw is not None and third is not None:
                dw.chunk(THIRDS)[k].copy_(third)
        return *passed, dw, db, None


def _upstream_factors(
    role: MapRole, gs: list[Tensor], each: list[Seen], needs_weight: bool, needs_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """nu, so that no example's part of dW is longer than C1 C2; and the bias's gradient, clipped."""
    c, clips = role.constants, switch.is_clipping()
    by_windows = each[0].lengths_BGP is not None
    found = [
        measures(
            role.map.channels(g), one.lengths_BGP, total=needs_bias, mass=needs_bias, square=not by_windows
        )
        for g, one in zip(gs, each, strict=True)
    ]
    if by_windows:  # lengths are those of inputs as they came
        scales = (one.scale_B[:, None] for one in each)
        norms = Norms(
            _joined(
                None if m.weighted is None else s * m.weighted for m, s in zip(found, scales, strict=True)
            )
        )
    else:
        norms = Norms(second=_joined(m.square for m in found), has_squares=True)
    bound = None
    if clips and needs_weight:
        bound = c.input_norm * c.grad_norm if by_windows else c.grad_norm
    if fits(gs[0]):
        nu_B = gradient_factors(norms, bound, c.most, LIMITS)
        switch.noted(nu_B)
    elif bound is None:
        nu_B = torch.isfinite(norms.of_examples()).double()
    else:
        nu_B = upstream_scales(norms.of_examples(), bound, c.most)
    if not needs_bias:
        return nu_B, None
    totals, masses = _joined(m.total for m in found), _joined(m.mass for m in found)
    return nu_B, weighted_rows(totals, masses, c, clips)


def _joined(thirds: Iterable[Tensor | None]) -> Tensor:
    """One row an example."""
    return torch.cat([t for t in thirds if t is not None], 1)
