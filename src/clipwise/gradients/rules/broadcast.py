"""A parameter laid out once for each example: expand (class tokens) and repeat (InstanceNorm's scale)."""

from __future__ import annotations

from torch import Tensor

from clipwise.gradients.forms import Form, Written, at_least_float32
from clipwise.gradients.layout import Layout
from clipwise.gradients.rules.registry import Finish, RuleDoesNotApply, Shapes, register
from clipwise.gradients.rules.sums import broadcast_sum
from clipwise.gradients.walk import Node


@register("ExpandBackward0", takes_complex=True)
def expand(node: Node, shapes: Shapes) -> Finish:
    """Every copy of the operand gets its own gradient; an example's copies are summed."""

    def finish(g: Tensor, layout: Layout) -> dict[int, Form]:
        return {0: broadcast_sum(g, layout, shapes[0])}

    return finish


@register("RepeatBackward0", takes_complex=True)
def repeat(node: Node, shapes: Shapes) -> Finish:
    """As expand, but a repeated axis holds (copies, size) and the examples must lie in the copies."""
    shape = shapes[0]

    def finish(g: Tensor, layout: Layout) -> dict[int, Form]:
        missing = g.dim() - len(shape)
        size = shape[layout.axis - missing] if layout.axis >= missing else 1
        if layout.inner % size:
            raise RuleDoesNotApply("an example holds a part of the operand")
        split = layout.split(at_least_float32(g))  # [B, ..., outer, inner, ...]
        sizes, summed = [layout.batch], []
        for d in range(g.dim()):
            extent = shape[d - missing] if d >= missing else 1
            copies = layout.outer * layout.inner // extent if d == layout.axis else g.shape[d] // extent
            summed.append(len(sizes))
            sizes += [copies, extent]
        return {0: Written.of(split.reshape(sizes).sum(summed).reshape(layout.batch, *shape))}

    return finish
