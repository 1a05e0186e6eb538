"""layers.linear_cross_entropy: an output layer with cross entropy, whose logits are never stored.

Legend: N positions of the batch, B examples with T positions each.
"""

from __future__ import annotations

from torch import Tensor

from clipwise.gradients.forms import Form, Head
from clipwise.gradients.layout import Layout
from clipwise.gradients.rules.registry import Finish, Shapes, register, require_axis
from clipwise.gradients.walk import Node


@register("_WeightGradientBackward")
def weight_gradient(node: Node, shapes: Shapes) -> Finish:
    """Operands: 0 the weight [V, d], 1 the bias [V]."""
    *_, x, lse, target = node.saved_tensors
    words = node.words()

    def finish(g: Tensor, layout: Layout) -> dict[int, Form]:
        require_axis(layout, 0)
        lse_BT, target_BT, g_BT = (layout.rows(t[:, None])[..., 0] for t in (lse, target, g))
        head = Head(words, layout.rows(x), lse_BT, target_BT, g_BT.to(lse.dtype))
        forms: dict[int, Form] = {}
        if 0 in shapes:
            forms[0] = head
        if 1 in shapes:
            forms[1] = head.bias()
        return forms

    return finish
