"""Products with a weight: nn.Linear with any number of middle dimensions, addmm, mm, x @ W, torch.bmm, nn.Bilinear.

torch folds positions into the rows of a matrix product; the layout unfolds them.

Legend: B examples, T positions; G products of a stack, each [N, d] x [d, p] with the examples along N.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.gradients.forms import Form, Outer, Written, at_least_float32
from clipwise.gradients.layout import Layout
from clipwise.gradients.rules.broadcast import broadcast_sum
from clipwise.gradients.rules.registry import Finish, RuleDoesNotApply, Shapes, register, require_axis
from clipwise.gradients.walk import Node

_OF_BILINEAR = ((1, 3), (0,), (1, 2), (2, 3))  # how F.bilinear calls the general three-way product


@register("AddmmBackward0", takes_complex=True)
def addmm(node: Node, shapes: Shapes) -> Finish:
    """out = beta bias + alpha left @ right."""
    alpha, beta = node._saved_alpha.conjugate(), node._saved_beta.conjugate()
    left = node._saved_mat1 if 2 in shapes else None
    right = node._saved_mat2 if 1 in shapes else None

    def finish(g: Tensor, layout: Layout) -> dict[int, Form]:
        forms = _factors(g if alpha == 1 else g * alpha, left, right, layout, 1)
        if 0 in shapes:
            forms[0] = broadcast_sum(g if beta == 1 else g * beta, layout, shapes[0])
        return forms

    return finish


@register("MmBackward0", takes_complex=True)
def mm(node: Node, shapes: Shapes) -> Finish:
    """out = left @ right."""
    left = node._saved_self if 1 in shapes else None
    right = node._saved_mat2 if 0 in shapes else None
    return lambda g, layout: _factors(g, left, right, layout, 0)


def _factors(g: Tensor, left: Tensor | None, right: Tensor | None, layout: Layout, first: int) -> dict[int, Form]:
    """out = left @ right, operands `first` and `first + 1`. The operand with a given partner is requested."""
    forms: dict[int, Form] = {}
    if right is not None:  # examples along the columns: gradient of left is sum_t g_t conj(right_t)^T
        require_axis(layout, 1)
        columns = layout.on_axis(0)
        forms[first] = _outer(columns.rows(g.T), columns.rows(right.T.conj()))
    if left is not None:  # examples along the rows: gradient of right is sum_t conj(left_t) g_t^T
        require_axis(layout, 0)
        forms[first + 1] = _outer(layout.rows(left.conj()), layout.rows(g))
    return forms


def _outer(left_BTm: Tensor, right_BTn: Tensor) -> Form:
    """sum_t left_t right_t^T. Complex products are written out, since inner products support real numbers only."""
    if not (left_BTm.is_complex() or right_BTn.is_complex()):
        return Outer(left_BTm, right_BTn)
    shape = torch.Size((left_BTm.shape[-1], right_BTn.shape[-1]))
    dtype = torch.promote_types(left_BTm.dtype, right_BTn.dtype)
    return Written(len(left_BTm), shape, dtype, lambda examples: left_BTm[examples].mT @ right_BTn[examples])


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
    require_axis(layout, axis)
    return at_least_float32(layout.on_axis(1).split(t_GNm)).flatten(2, 3)


def _products(left_BGTm: Tensor, right_BGTn: Tensor) -> Written:
    batch, groups, _, m = left_BGTm.shape
    shape = torch.Size((groups, m, right_BGTn.shape[-1]))

    def make(examples: slice) -> Tensor:
        return left_BGTm[examples].mT @ right_BGTn[examples]

    return Written(batch, shape, left_BGTm.dtype, make)


@register("TrilinearBackward0")
def bilinear(node: Node, shapes: Shapes) -> Finish:
    """Operand 1: the weight [o, i, j]; W_o's gradient is sum_t g_to x_t y_t^T."""
    called = (node._saved_expand1, node._saved_expand2, node._saved_expand3, node._saved_sumdim)
    if set(shapes) != {1} or tuple(map(tuple, called)) != _OF_BILINEAR:
        raise RuleDoesNotApply("another product of three tensors")
    x, y = node._saved_i1, node._saved_i3

    def finish(g: Tensor, layout: Layout) -> dict[int, Form]:
        require_axis(layout, 0)
        g_BTo, x_BTi, y_BTj = (layout.rows(at_least_float32(t)) for t in (g, x, y))

        def make(examples: slice) -> Tensor:
            return torch.einsum("bto,bti,btj->boij", g_BTo[examples], x_BTi[examples], y_BTj[examples])

        return {1: Written(layout.batch, shapes[1], g_BTo.dtype, make)}

    return finish
