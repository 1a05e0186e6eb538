"""nn.Embedding and F.embedding: repeated ids, padding_idx."""

from __future__ import annotations

from torch import Tensor

from clipwise.errors import CoupledExamplesError
from clipwise.gradients.forms import Form, Rows, at_least_float32
from clipwise.gradients.layout import Layout
from clipwise.gradients.rules.registry import Finish, RuleDoesNotApply, Shapes, register
from clipwise.gradients.walk import Node


@register("EmbeddingBackward0")
def embedding(node: Node, shapes: Shapes) -> Finish:
    """Operand 0: the table [V, n]. torch gives a missing padding_idx as -1 in unsigned 64 bits."""
    if node._saved_scale_grad_by_freq:
        raise CoupledExamplesError(
            "An embedding has scale_grad_by_freq=True: it divides an example's gradient by how often its ids "
            "occur in the whole batch. Set scale_grad_by_freq=False."
        )
    ids, padding = node._saved_indices, node._saved_padding_idx

    def finish(g: Tensor, layout: Layout) -> dict[int, Form]:
        if layout.axis >= ids.dim():
            raise RuleDoesNotApply("the examples lie along the embedding's own dimension")
        g_BTn = at_least_float32(layout.rows(g))
        ids_BT = layout.split(ids).reshape(layout.batch, -1)
        if 0 <= padding < shapes[0][0]:
            g_BTn = g_BTn.masked_fill((ids_BT == padding)[..., None], 0)
        return {0: Rows(ids_BT, g_BTn, shapes[0][0])}

    return finish
