"""Matrix products: nn.Linear with any number of middle dimensions, addmm, mm, x @ W.

Positions were folded into the rows of a matrix product before autograd saw it; the layout unfolds them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.gradients.forms import Form, Outer, Written
from clipwise.gradients.layout import Layout
from clipwise.gradients.rules.registry import Finish, RuleDoesNotApply, Shapes, register
from clipwise.gradients.rules.sums import broadcast_sum
from clipwise.gradients.walk import Node


@register("AddmmBackward0", takes_complex=True)
def addmm(node: Node, shapes: Shapes) -> Finish:
    """out = beta bias + alpha mat1 @ mat2."""
    alpha, beta = node._saved_alpha.conjugate(), node._saved_beta.conjugate()
    mat1 = node._saved_mat1 if 2 in shapes else None
    mat2 = node._saved_mat2 if 1 in shapes else None

    def finish(g: Tensor, layout: Layout) -> dict[int, Form]:
        forms: dict[int, Form] = {}
        if 0 in shapes:
            forms[0] = broadcast_sum(g if beta == 1 else g * beta, layout, shapes[0])
        scaled = g if alpha == 1 else g * alpha
        if mat2 is not None:
            forms[1] = _left_factor(scaled, mat2, layout)
        if mat1 is not None:
            forms[2] = _right_factor(mat1, scaled, layout)
        return forms

    return finish


@register("MmBackward0", takes_complex=True)
def mm(node: Node, shapes: Shapes) -> Finish:
    """out = left @ right."""
    left = node._saved_self if 1 in shapes else None
    right = node._saved_mat2 if 0 in shapes else None

    def finish(g: Tensor, layout: Layout) -> dict[int, Form]:
        forms: dict[int, Form] = {}
        if right is not None:
            forms[0] = _left_factor(g, right, layout)
        if left is not None:
            forms[1] = _right_factor(left, g, layout)
        return forms

    return finish


def _right_factor(left: Tensor, g: Tensor, layout: Layout) -> Form:
    """out = left @ W with examples along the rows: gradient of W is sum_t conj(left_t) g_t^T."""
    if layout.axis != 0:
        raise RuleDoesNotApply("the examples do not lie along the rows")
    return _outer(layout.rows(left.conj()), layout.rows(g))


def _left_factor(g: Tensor, right: Tensor, layout: Layout) -> Form:
    """out = W @ right with examples along the columns: gradient of W is sum_t g_t conj(right_t)^T."""
    if layout.axis != 1:
        raise RuleDoesNotApply("the examples do not lie along the columns")
    columns = layout.on_axis(0)
    return _outer(columns.rows(g.T), columns.rows(right.T.conj()))


def _outer(left_BTm: Tensor, right_BTn: Tensor) -> Form:
    """sum_t left_t right_t^T. Complex ones are written out: inner products of positions are of real numbers."""
    if not (left_BTm.is_complex() or right_BTn.is_complex()):
        return Outer(left_BTm, right_BTn)
    shape = torch.Size((left_BTm.shape[-1], right_BTn.shape[-1]))
    dtype = torch.promote_types(left_BTm.dtype, right_BTn.dtype)
    return Written(len(left_BTm), shape, dtype, lambda examples: left_BTm[examples].mT @ right_BTn[examples])
