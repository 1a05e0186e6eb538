"""Tensors made of parameters alone: transposes, views, casts, normalised or adapted weights.

A use gives gradients with respect to the tensor that it took. Where that tensor is only another view of
a parameter (an *isometric* path), the norm is the parameter's own, and only the weighted sum has to be
carried back. Everywhere else each example's gradient is written out and carried back by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from clipwise.gradients.walk import Node, named, node_name

# Backward functions that keep the norm: they move entries about or pad them with zeros. A cast rounds, by
# less than a relative unit roundoff.
_ISOMETRIC = named(
    *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Alias", "Unsqueeze", "Squeeze"),
    *("Clone", "ToCopy", "Slice", "Select", "Narrow", "Neg", "Flip", "Movedim"),
)
_CASTS = named("ToCopy")


@dataclass(frozen=True)
class Path:
    """From the tensor that a use took (an output of `source`) back to the parameters behind it."""

    source: Node
    number: int
    parameters: Mapping[str, torch.nn.Parameter]
    isometric: bool
    nodes: tuple[Node, ...]  # on the way of an isometric path

    @classmethod
    def identity(cls, name: str, parameter: torch.nn.Parameter) -> Path:
        """No way at all: the gradients are the parameter's own."""
        return cls(None, 0, {name: parameter}, True, ())

    @property
    def steps(self) -> tuple[str, ...]:
        """The operations on the way of an isometric path."""
        return tuple(node_name(node) for node in self.nodes)

    @property
    def owner(self) -> str:
        """The one parameter at the end of an isometric path."""
        return next(iter(self.parameters))

    def pull(self, gradient: Tensor) -> dict[str, Tensor]:
        """Carry one gradient back on an isometric path, in its own precision.

        It is a sum over examples: to round it to the bfloat16 of a weight under autocast, as the engine
        would, moves it by 2^-9 of *its* norm, which is no function of one example.
        """
        for node in self.nodes:
            if node_name(node) not in _CASTS:
                gradient = node(gradient)
        return {self.owner: gradient.to(self.parameters[self.owner].device)}

    def pull_each(self, gradients_b: Tensor) -> dict[str, Tensor]:
        """Carry the gradients of several examples back, each by itself: [b, ...]."""
        if not self.steps and self.isometric:
            return {self.owner: gradients_b}
        if self.steps == ("TBackward0",):
            return {self.owner: gradients_b.mT}
        meta = self.source._input_metadata[self.number]
        gradients_b = gradients_b.to(meta.dtype)
        try:
            found = self._backward(gradients_b, batched=True)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # an operation on the way that torch cannot batch
            each = [self._backward(g, batched=False) for g in gradients_b]
            found = tuple(torch.stack(grads) for grads in zip(*each, strict=True))
        return dict(zip(self.parameters, found, strict=True))

    def _backward(self, gradient: Tensor, batched: bool) -> tuple[Tensor, ...]:
        edge = torch.autograd.graph.GradientEdge(self.source, self.number)
        targets = list(self.parameters.values())
        return torch.autograd.grad(
            [edge], targets, [gradient], retain_graph=True, is_grads_batched=batched, materialize_grads=True
        )


def path_to(
    source: Node, number: int, names: Mapping[Node, str], parameters: Mapping[str, torch.nn.Parameter]
) -> Path:
    """Follow a DERIVED tensor back to its parameters."""
    nodes: list[Node] = []
    node = source
    while node not in names and node_name(node) in _ISOMETRIC and len(node.next_functions) == 1:
        nodes.append(node)
        node = node.next_functions[0][0]
    if node in names:
        name = names[node]
        return Path(source, number, {name: parameters[name]}, True, tuple(nodes))
    behind: dict[str, torch.nn.Parameter] = {}
    stack = [source]
    while stack:
        node = stack.pop()
        if node in names:
            behind[names[node]] = parameters[names[node]]
        stack.extend(child for child, _ in node.next_functions if child is not None)
    return Path(source, number, behind, False, ())
