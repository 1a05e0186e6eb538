"""Sums, differences, products, quotients, PReLU and choices with a broadcast operand: biases, scales, slopes."""

from __future__ import annotations

from torch import Tensor

from clipwise.gradients.forms import Form, at_least_float32
from clipwise.gradients.layout import Layout
from clipwise.gradients.rules.registry import Finish, RuleDoesNotApply, Shapes, register
from clipwise.gradients.rules.sums import broadcast_sum
from clipwise.gradients.walk import Node


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
    factor: dict[int, float | Tensor] = {}
    if 0 in shapes:
        factor[0] = node._saved_other.conj()
    if 1 in shapes:
        factor[1] = node._saved_self.conj()
    return _linear(shapes, factor)


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
        raise RuleDoesNotApply("what goes in is made of parameters")
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
    """The gradient of an operand at each position is g times that operand's factor there."""

    def finish(g: Tensor, layout: Layout) -> dict[int, Form]:
        g = at_least_float32(g)
        return {j: broadcast_sum(g * factor[j], layout, shape) for j, shape in shapes.items()}

    return finish
