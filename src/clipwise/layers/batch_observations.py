"""Per-row statistics of a layer's input, attached to the autograd graph of the losses.

The graph holds the observation, and no module does. It is freed with the graph, and a forward pass whose losses are
not used leaves nothing behind.
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
    """Shape and dtype of a layer's output [B, C, ...]; mean and (biased) variance of its input over positions."""

    layer: nn.Module
    shape: torch.Size
    dtype: torch.dtype
    mean_BC: Tensor
    var_BC: Tensor

    @property
    def positions(self) -> int:
        return math.prod(self.shape[2:])


def observed(output: Tensor, layer: nn.Module, input: Tensor) -> Tensor:
    """The output unchanged, with an `Observation` of the input ([B, C, ...]) on its graph node."""
    values = input.detach()
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()
    values_BCT = values.flatten(2) if values.dim() > 2 else values[..., None]
    if values.numel():
        var_BC, mean_BC = torch.var_mean(values_BCT, 2, correction=0)
    else:  # torch would warn, and whether a batch is empty is secret
        var_BC = mean_BC = values.new_zeros(values.shape[:2])
    seen = Observation(layer, output.shape, output.dtype, mean_BC, var_BC)
    # The anchor requires a gradient, so a node exists even if nothing before the layer is trained.
    result: Tensor = _Carry.apply(output, torch.zeros((), requires_grad=True), seen)  # type: ignore[no-untyped-call]
    return result


def observations(losses: Tensor) -> Iterator[tuple[Observation, GradientEdge]]:
    """Every observation in the graph of the losses, with the edge of the layer's output."""
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
    """The identity; its node carries an observation."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, seen: Observation) -> Tensor:
        ctx.seen = seen
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None
