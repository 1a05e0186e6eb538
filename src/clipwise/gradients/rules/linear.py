"""Matrix products: nn.Linear with any number of middle dimensions, addmm, mm, x @ W.

Positions were folded into the rows of a matrix product before autograd saw it; the layout unfolds them.
"""

from __future__ import annotations

from torch import Tensor

from clipwise.gradients.forms import Form, Outer
from clipwise.gradients.layout import Layout
from clipwise.gradients.rules.registry import Finish, RuleDoesNotApply, Shapes, register
from clipwise.gradients.rules.sums import broadcast_sum
from clipwise.gradients.walk import Node


@register("AddmmBackward0")
def addmm(node: Node, shapes: Shapes) -> Finish:
    """out = beta bias + alpha mat1 @ mat2."""
    alpha, beta = node._saved_alpha, node._saved_beta
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


@register("MmBackward0")
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


def _right_factor(left: Tensor, g: Tensor, layout: Layout) -> Outer:
    """out = left @ W with examples along the rows: gradient of W is sum_t left_t g_t^T."""
    if layout.axis != 0:
        raise RuleDoesNotApply("the examples do not lie along the rows")
    return Outer(layout.rows(left), layout.rows(g))


def _left_factor(g: Tensor, right: Tensor, layout: Layout) -> Outer:
    """out = W @ right with examples along the columns: gradient of W is sum_t g_t right_t^T."""
    if layout.axis != 1:
        raise RuleDoesNotApply("the examples do not lie along the columns")
    columns = layout.on_axis(0)
    return Outer(columns.rows(g.T), columns.rows(right.T))
