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


@dataclass(frozen=True)
class Path:
    """From the tensor that a use took (an output of `source`) back to the parameters behind it."""

    source: Node
    number: int
    parameters: Mapping[str, torch.nn.Parameter]
    isometric: bool
    steps: tuple[str, ...]  # the operations on the way of an isometric path

    @classmethod
    def identity(cls, name: str, parameter: torch.nn.Parameter) -> Path:
        """No way at all: the gradients are the parameter's own."""
        return cls(None, 0, {name: parameter}, True, ())

    @property
    def owner(self) -> str:
        """The one parameter at the end of an isometric path."""
        return next(iter(self.parameters))

    def pull(self, gradient: Tensor) -> dict[str, Tensor]:
        """Carry one gradient back."""
        if self.steps == ("TBackward0",):
            return {self.owner: gradient.T}
        return dict(zip(self.parameters, self._vjp(gradient, batched=False), strict=True))

    def pull_each(self, gradients_b: Tensor) -> dict[str, Tensor]:
        """Carry the gradients of several examples back, each by itself: [b, ...]."""
        if not self.steps and self.isometric:
            return {self.owner: gradients_b}
        if self.steps == ("TBackward0",):
            return {self.owner: gradients_b.mT}
        return dict(zip(self.parameters, self._vjp(gradients_b, batched=True), strict=True))

    def _vjp(self, gradient: Tensor, batched: bool) -> tuple[Tensor, ...]:
        targets = list(self.parameters.values())
        if not self.steps and self.isometric:
            return (gradient,)
        meta = self.source._input_metadata[self.number]
        edge = torch.autograd.graph.GradientEdge(self.source, self.number)
        return torch.autograd.grad(
            [edge], targets, [gradient.to(meta.dtype)], retain_graph=True, is_grads_batched=batched
        )


def path_to(
    source: Node, number: int, names: Mapping[Node, str], parameters: Mapping[str, torch.nn.Parameter]
) -> Path:
    """Follow a DERIVED tensor back to its parameters."""
    steps: list[str] = []
    node = source
    while node not in names and node_name(node) in _ISOMETRIC and len(node.next_functions) == 1:
        steps.append(node_name(node))
        node = node.next_functions[0][0]
    if node in names:
        name = names[node]
        return Path(source, number, {name: parameters[name]}, True, tuple(steps))
    behind: dict[str, torch.nn.Parameter] = {}
    stack = [source]
    while stack:
        node = stack.pop()
        if node in names:
            behind[names[node]] = parameters[names[node]]
        stack.extend(child for child, _ in node.next_functions if child is not None)
    return Path(source, number, behind, False, ())
