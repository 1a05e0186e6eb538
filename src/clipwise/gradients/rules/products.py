"""Products with a weight, and operands that are broadcast.

Products: nn.Linear with any number of middle dimensions, addmm, mm, x @ W, torch.bmm, nn.Bilinear. torch folds
positions into the rows of a matrix product; the layout unfolds them.

Broadcast operands: biases, scales, slopes, `where`, class tokens (expand), InstanceNorm's scale (repeat). Their
gradient is summed over the positions of one example that they were broadcast to.

Legend: B examples, T positions; G products of a stack, each [N, d] x [d, p] with the examples along N.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.gradients.forms import Form, Outer, Written, at_least_float32
from clipwise.gradients.layout import Layout
from clipwise.gradients.rules.registry import Finish, RuleDoesNotApply, Shapes, register, require_axis
from clipwise.gradients.walk import Node
from clipwise.kernels.affine import position_sums

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
    if left is not None and right is None and layout.is_simple and not (g.is_complex() or left.is_complex()):
        return {first + 1: Outer(left[:, None], g[:, None])}  # nearly always: one row per example
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


@register("AddBackward0", takes_complex=True)
def add(node: Node, shapes: Shapes) -> Finish:
    """out = left + alpha right."""
    return _linear(shapes, {0: 1, 1: node._saved_alpha.conjugate()})


@register("SubBackward0", takes_complex=True)
def sub(node: Node, shapes: Shapes) -> Finish:
    """out = left - alpha right."""
    return _linear(shapes, {0: 1, 1: -node._saved_alpha.conjugate()})


@register("MulBackward0", takes_complex=True)
def mul(node: Node, shapes: Shapes) -> Finish:
    """out = left * right."""
    return _linear(shapes, {j: (node._saved_self if j else node._saved_other).conj() for j in shapes})


@register("DivBackward0", takes_complex=True)
def div(node: Node, shapes: Shapes) -> Finish:
    """out = left / right."""
    right = node._saved_other
    factor: dict[int, float | Tensor] = {}
    if 0 in shapes:
        factor[0] = 1 / at_least_float32(right).conj()
    if 1 in shapes:
        factor[1] = (-at_least_float32(node._saved_self) / at_least_float32(right).square()).conj()
    return _linear(shapes, factor)


@register("PreluKernelBackward0")
def prelu(node: Node, shapes: Shapes) -> Finish:
    """out = x where x > 0, else slope * x. Operand 1: the slope."""
    if 0 in shapes:
        raise RuleDoesNotApply("the input is computed from parameters")
    return _linear(shapes, {1: node._saved_self.clamp(max=0)})


@register("WhereBackward0", takes_complex=True)
def where(node: Node, shapes: Shapes) -> Finish:
    """out = left where the condition holds, else right."""
    condition = node._saved_condition
    return _linear(shapes, {0: condition, 1: ~condition})


@register("MaskedFillBackward0", "MaskedFillBackward1", takes_complex=True)
def masked_fill(node: Node, shapes: Shapes) -> Finish:
    """out = x where the mask is false, else one value."""
    mask = node._saved_mask
    return _linear(shapes, {0: ~mask, 1: mask})


def _linear(shapes: Shapes, factor: dict[int, float | Tensor]) -> Finish:
    """The gradient of an operand at each position is g times the operand's factor at that position."""

    def finish(g: Tensor, layout: Layout) -> dict[int, Form]:
        g = at_least_float32(g)
        return {j: broadcast_sum(g * factor[j], layout, shape) for j, shape in shapes.items()}

    return finish


@register("ExpandBackward0", takes_complex=True)
def expand(node: Node, shapes: Shapes) -> Finish:
    """Each copy of the operand has its own gradient; the copies of an example are summed."""
    return lambda g, layout: {0: broadcast_sum(g, layout, shapes[0])}


@register("RepeatBackward0", takes_complex=True)
def repeat(node: Node, shapes: Shapes) -> Finish:
    """Like expand, but a repeated axis is (copies, size), and the examples must lie along the copies."""
    shape = shapes[0]

    def finish(g: Tensor, layout: Layout) -> dict[int, Form]:
        missing = g.dim() - len(shape)
        size = shape[layout.axis - missing] if layout.axis >= missing else 1
        if layout.inner % size:
            raise RuleDoesNotApply("an example holds only a part of the operand")
        split = layout.split(at_least_float32(g))  # [B, ..., outer, inner, ...]
        sizes, summed = [layout.batch], []
        for d in range(g.dim()):
            extent = shape[d - missing] if d >= missing else 1
            copies = layout.outer * layout.inner // extent if d == layout.axis else g.shape[d] // extent
            summed.append(len(sizes))
            sizes += [copies, extent]
        return {0: Written.of(split.reshape(sizes).sum(summed).reshape(layout.batch, *shape))}

    return finish


def broadcast_sum(h: Tensor, layout: Layout, shape: torch.Size) -> Written:
    """Per example, sum `h` down to an operand of `shape` that was broadcast to h's shape."""
    missing = h.dim() - len(shape)
    if layout.axis >= missing and shape[layout.axis - missing] != 1:
        raise RuleDoesNotApply("the operand has an entry for each example")
    if shape and layout.is_simple and missing == 1 and h.shape[1:] == shape:
        return Written.of(h if h.dtype is torch.float32 else at_least_float32(h))  # nothing to sum
    if shape and layout.axis < missing and h.shape[missing:] == shape:  # nearly always a bias
        h_BTp = layout.rows(h.flatten(missing))
        one_position = h_BTp.shape[1] == 1  # nothing to sum, e.g. at each time step of an RNN
        if one_position or h.is_complex():
            sums_Bp = at_least_float32(h_BTp[:, 0] if one_position else h_BTp.sum(1))
        else:
            sums_Bp = position_sums(h_BTp)
        return Written.of(sums_Bp.reshape(layout.batch, *shape))
    split = layout.split(at_least_float32(h))  # [B, ..., outer, inner, ...]
    summed = [layout.axis + 1, layout.axis + 2]
    for d in range(h.dim()):
        if d != layout.axis and (d < missing or shape[d - missing] == 1):
            summed.append(d + 1 if d < layout.axis else d + 2)
    return Written.of(split.sum(summed).reshape(layout.batch, *shape))


def channel_sum(h: Tensor, layout: Layout) -> Written:
    """Per example, sum `h` of shape [N, C, ...] down to [C]."""
    require_axis(layout, 0)
    split = layout.split(at_least_float32(h))  # [B, outer, inner, C, ...]
    return Written.of(split.sum([1, 2, *range(4, split.dim())]))
