"""Any other operation, exactly: its own backward function, called once for each example.

A node's backward function is linear in the output gradient. With all rows but those of example i set to
0, it returns the gradient of example i with respect to each input, whatever the operation computes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from clipwise.gradients.forms import Form, Written
from clipwise.gradients.layout import Layout
from clipwise.gradients.walk import Node


def call(node: Node, outputs: Mapping[int, Tensor]) -> tuple[Tensor | None, ...]:
    """Run one node's backward function, with zeros for outputs that have no gradient."""
    grads = []
    for number, meta in enumerate(node._input_metadata):
        given = outputs.get(number)
        if given is None:
            given = torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)
        grads.append(given)
    with torch.no_grad():
        # A custom autograd.Function's node is not callable itself.
        result = node(*grads) if callable(node) else node.apply(*grads)
    return result if isinstance(result, tuple) else (result,)


def forms(
    node: Node,
    shapes: Mapping[int, torch.Size],
    outputs: Mapping[int, Tensor],
    layouts: Mapping[int, Layout],
) -> dict[int, Form]:
    """One form for each wanted operand, at the price of B calls of the node."""
    batch = next(iter(layouts.values())).batch
    if not all(bool(torch.isfinite(g).all()) for g in outputs.values()):
        _clear_saved(node)
    device = next(iter(outputs.values())).device
    rows: dict[int, list[Tensor]] = {operand: [] for operand in shapes}
    for i in range(batch):
        grads = call(node, {k: _only(g, layouts[k], i) for k, g in outputs.items()})
        for operand, shape in shapes.items():
            grad = grads[operand]
            # A node may leave the sum over broadcast positions to the engine that called it.
            one = torch.zeros(shape, device=device) if grad is None else grad.detach().sum_to_size(shape)
            rows[operand].append(one)
    return {operand: Written.of(torch.stack(grads)) for operand, grads in rows.items()}


def _only(g: Tensor, layout: Layout, example: int) -> Tensor:
    """The rows of one example; the others are cleared (and not multiplied by 0: 0 * Inf is NaN)."""
    others = torch.ones(layout.batch, dtype=torch.bool, device=g.device)
    others[example] = False
    shape = [1] * g.dim()
    shape[layout.axis] = -1
    return g.masked_fill(layout.along_axis(others).view(shape), 0)


def _clear_saved(node: Node) -> None:
    """Keep an example that is not finite away from the others.

    A summed weight gradient multiplies every row that the node saved, those of an Inf or NaN example
    by 0. Those entries are cleared in the saved tensors of this one node, whose graph ends with this
    step. The example itself is known by its output gradient, which is not finite either.
    """
    for name in dir(node):
        if name.startswith("_saved_"):
            saved = getattr(node, name)
            if isinstance(saved, Tensor) and saved.is_floating_point():
                saved.data.nan_to_num_(0.0, 0.0, 0.0)
