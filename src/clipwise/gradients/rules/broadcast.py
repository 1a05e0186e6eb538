"""Operands that are broadcast: biases, scales, slopes, `where`, class tokens (expand), InstanceNorm's scale (repeat).

The gradient of an operand is summed over the positions of one example that it was broadcast to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.gradients.forms import Form, Written, at_least_float32
from clipwise.gradients.layout import Layout
from clipwise.gradients.rules.registry import Finish, RuleDoesNotApply, Shapes, register, require_axis
from clipwise.gradients.walk import Node
from clipwise.kernels.affine import position_sums


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
        raise RuleDoesNotApply("the input is made of parameters")
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
