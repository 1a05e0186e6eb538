"""Grouped products, in which consecutive rows are multiplied by the weight of one expert (`grouped_mm`).

Legend: B examples, S rows sorted by expert, E experts, T the most rows that one expert has of one example.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.gradients.forms import Form, Written, at_least_float32
from clipwise.gradients.layout import Layout, Ragged
from clipwise.gradients.rules.registry import Finish, RuleDoesNotApply, Shapes, register, require_axis
from clipwise.gradients.walk import Node


@register("GroupedMmBackward0")
def grouped_mm(node: Node, shapes: Shapes) -> Finish:
    """out[rows of e] = left[rows of e] @ weight[e]. Operand 1: the weights [E, m, n]."""
    offsets_E = node._saved_offs
    if set(shapes) != {1} or len(shapes[1]) != 3 or offsets_E is None or node._saved_self.dim() != 2:
        raise RuleDoesNotApply("another grouped product than one with the rows of experts")
    left_Sm = node._saved_self

    def finish(g: Tensor, layout: Layout) -> dict[int, Form]:
        require_axis(layout, 0)
        rows = torch.arange(len(g), device=g.device)
        expert_S = torch.searchsorted(offsets_E.long(), rows, right=True)
        owner_S, experts = layout.owners(g.device), len(offsets_E)
        # Rows behind the last offset are not computed.
        pair_S = torch.where((owner_S >= 0) & (expert_S < experts), owner_S * experts + expert_S, -1)
        pairs = Ragged.of(0, pair_S, layout.batch * experts)

        def split(t_Sm: Tensor) -> Tensor:
            """[S, m] -> [B, E, T, m]."""
            rows_PTm = pairs.rows(at_least_float32(t_Sm))
            return rows_PTm.view(layout.batch, experts, *rows_PTm.shape[1:])

        left_BETm, g_BETn = split(left_Sm), split(g)

        def make(examples: slice) -> Tensor:
            return left_BETm[examples].mT @ g_BETn[examples]

        return {1: Written(layout.batch, shapes[1], g_BETn.dtype, make)}

    return finish
