"""What a layer saw of a batch, tied to the losses that came of it.

A layer that only looks leaves no trace in the losses. Here what it saw hangs on a node of their autograd graph: it
lives as long as that graph, a forward pass whose losses are not used leaves nothing behind, and no module holds
anything of private data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Observation:
    """What a layer saw in one forward pass.

    Args:
        layer: which one.
        count: of values in each channel.
        mean_C: their mean.
        var_C: the mean square of their differences from it.
    """

    layer: nn.Module
    count: int
    mean_C: Tensor
    var_C: Tensor


def observed(output: Tensor, layer: nn.Module, input: Tensor) -> Tensor:
    """The output of a layer as it is, on whose graph hangs what the layer saw: inputs of shape [B, C, ...]."""
    values = input.detach()
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()
    count = values.numel() // values.shape[1]
    if count == 0:  # torch would warn of it, and who is drawn is secret
        values = values.new_zeros(1, values.shape[1])
    var_C, mean_C = torch.var_mean(values, [d for d in range(values.dim()) if d != 1], correction=0)
    seen = Observation(layer, count, mean_C, var_C)
    # The anchor requires a gradient, so that there is a node even if nothing before the layer is trained.
    result: Tensor = _Carry.apply(output, torch.zeros((), requires_grad=True), seen)  # type: ignore[no-untyped-call]
    return result


def observations(losses: Tensor) -> Iterator[Observation]:
    """All that layers saw in the forward passes which the losses came of."""
    root: Any = losses.grad_fn
    entered, stack = {root}, [root]
    while stack:
        node = stack.pop()
        seen = getattr(node, "seen", None)
        if isinstance(seen, Observation):
            yield seen
        for child, _ in node.next_functions:
            if child is not None and child not in entered:
                entered.add(child)
                stack.append(child)


class _Carry(torch.autograd.Function):
    """The identity, whose node carries something."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, seen: Observation) -> Tensor:
        ctx.seen = seen
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None
