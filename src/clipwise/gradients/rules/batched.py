"""A stack of matrix products with a stack of weights: torch.bmm, and what einsum makes of heads or experts.

Legend: G products, each [N, d] x [d, p]; the examples lie along N, as T positions each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.gradients.forms import Form, Written, at_least_float32
from clipwise.gradients.layout import Layout
from clipwise.gradients.rules.registry import Finish, RuleDoesNotApply, Shapes, register
from clipwise.gradients.walk import Node


@register("BmmBackward0", takes_complex=True)
def bmm(node: Node, shapes: Shapes) -> Finish:
    """out_g = left_g @ right_g. Operand 0 or 1 is the stack of weights."""
    left = node._saved_self if 1 in shapes else None
    right = node._saved_mat2 if 0 in shapes else None

    def finish(g: Tensor, layout: Layout) -> dict[int, Form]:
        forms: dict[int, Form] = {}
        if left is not None:  # gradient of right_g: sum_t left_gt g_gt^T, examples along the rows
            forms[1] = _products(_rows(left.conj(), layout, 1), _rows(g, layout, 1))
        if right is not None:  # gradient of left_g: sum_t g_gt right_gt^T, examples along the columns
            forms[0] = _products(_rows(g.mT, layout, 2), _rows(right.mT.conj(), layout, 2))
        return forms

    return finish


def _rows(t_GNm: Tensor, layout: Layout, axis: int) -> Tensor:
    """[G, N, m] -> [B, G, T, m]."""
    if layout.axis != axis:
        raise RuleDoesNotApply("the examples do not lie along the other operand's axis")
    return at_least_float32(layout.on_axis(1).split(t_GNm)).flatten(2, 3)


def _products(left_BGTm: Tensor, right_BGTn: Tensor) -> Written:
    batch, groups, _, m = left_BGTm.shape
    shape = torch.Size((groups, m, right_BGTn.shape[-1]))

    def make(examples: slice) -> Tensor:
        return left_BGTm[examples].mT @ right_BGTn[examples]

    return Written(batch, shape, left_BGTm.dtype, make)
