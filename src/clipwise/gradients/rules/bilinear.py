"""nn.Bilinear: out_o = x^T W_o y + b_o. The bias is added by an operation of its own.

Legend: B examples, T positions, o outputs, i and j the sizes of the two inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.gradients.forms import Form, Written, at_least_float32
from clipwise.gradients.layout import Layout
from clipwise.gradients.rules.registry import Finish, RuleDoesNotApply, Shapes, register
from clipwise.gradients.walk import Node

_OF_BILINEAR = ((1, 3), (0,), (1, 2), (2, 3))  # how F.bilinear calls the general three-way product


@register("TrilinearBackward0")
def bilinear(node: Node, shapes: Shapes) -> Finish:
    """Operand 1: the weight [o, i, j]; W_o's gradient is sum_t g_to x_t y_t^T."""
    called = (node._saved_expand1, node._saved_expand2, node._saved_expand3, node._saved_sumdim)
    if set(shapes) != {1} or tuple(map(tuple, called)) != _OF_BILINEAR:
        raise RuleDoesNotApply("another product of three tensors")
    x, y = node._saved_i1, node._saved_i3

    def finish(g: Tensor, layout: Layout) -> dict[int, Form]:
        if layout.axis != 0:
            raise RuleDoesNotApply("the examples do not lie along the rows")
        g_BTo, x_BTi, y_BTj = (layout.rows(at_least_float32(t)) for t in (g, x, y))

        def make(examples: slice) -> Tensor:
            return torch.einsum("bto,bti,btj->boij", g_BTo[examples], x_BTi[examples], y_BTj[examples])

        return {1: Written(layout.batch, shapes[1], g_BTo.dtype, make)}

    return finish
