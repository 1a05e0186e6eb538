"""Clipped embeddings. Ids have no norm to clip, so the bound uses the upstream gradient alone.

The gradient of row v of the table is the sum of g_t over the positions t with id v. With `most` the count of an
example's most frequent id (positions with a zero gradient, such as padding, do not count),

    |dW| <= |(sum_t |g_tc|)_c|        per channel, for any ids
    |dW| <= sqrt(most) |g|            per row, by Cauchy's inequality

and the smaller bound is clipped to C2. It is exact if no id repeats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from clipwise.gradients.forms import at_least_float32
from clipwise.layers.clipped import switch
from clipwise.layers.clipped.layer import OneInputLayer, Role
from clipwise.layers.clipped.scales import Constants, lengths, scaled, upstream_scales

_NONE = -1


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

    def __init__(self, layer: nn.Embedding, constants: Constants, uses: int = 1, name: str = "") -> None:
        super().__init__(layer, constants, uses, name)
        options = ("max_norm", "scale_grad_by_freq", "sparse")
        self.refuse_if(**{option: (getattr(layer, option), "build it without") for option in options})

    def _take(self, constants: Constants) -> None:
        self._role = Role(self, constants)

    def bounds(self) -> Mapping[str, float]:
        return {"weight": self.constants.grad_norm}

    def _least_dimensions(self) -> int:
        return 1

    def _clipped(self, x: Tensor) -> Tensor:
        """Map ids (B, ...) to (B, ..., d)."""
        padding = _NONE if self.layer.padding_idx is None else self.layer.padding_idx
        z: Tensor = ClippedLookup.apply(x, self.layer.weight, padding, self._role)  # type: ignore[no-untyped-call]
        return z
