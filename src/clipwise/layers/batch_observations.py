"""What a layer saw of a batch, tied to the losses that came of it.

A layer that only looks leaves no trace in the losses. Here what it saw hangs on a node of their autograd graph: it
lives as long as that graph, a forward pass whose losses are not used leaves nothing behind, and no module holds
anything of private data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge


@dataclass(frozen=True)
class Observation:
    """What a layer saw in one forward pass.

    Args:
        layer: which one.
        shape, dtype: of its output, [B, C, ...].
        mean_BC: of each row and channel, over positions.
        var_BC: the mean square of the differences from it.
    """

    layer: nn.Module
    shape: torch.Size
    dtype: torch.dtype
    mean_BC: Tensor
    var_BC: Tensor

    @property
    def positions(self) -> int:
        """How many values a row has in a channel."""
        return math.prod(self.shape[2:])


def observed(output: Tensor, layer: nn.Module, input: Tensor) -> Tensor:
    """The output of a layer as it is, on whose graph hangs what the layer saw: inputs of shape [B, C, ...]."""
    values = input.detach()
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()
    values_BCT = values.flatten(2) if values.dim() > 2 else values[..., None]
    if values.numel():
        var_BC, mean_BC = torch.var_mean(values_BCT, 2, correction=0)
    else:  # torch would warn of it, and who is drawn is secret
        var_BC = mean_BC = values.new_zeros(values.shape[:2])
    seen = Observation(layer, output.shape, output.dtype, mean_BC, var_BC)
    # The anchor requires a gradient, so that there is a node even if nothing before the layer is trained.
    result: Tensor = _Carry.apply(output, torch.zeros((), requires_grad=True), seen)  # type: ignore[no-untyped-call]
    return result


def observations(losses: Tensor) -> Iterator[tuple[Observation, GradientEdge]]:
    """All that layers saw in the forward passes which the losses came of, each with the layer's output there."""
    root: Any = losses.grad_fn
    entered, stack = {root}, [root]
    while stack:
        node = stack.pop()
        seen = getattr(node, "seen", None)
        if isinstance(seen, Observation):
            yield seen, GradientEdge(node, 0)
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
