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

from clipwise.gradients.operations import CASTS, TRANSPOSE
from clipwise.gradients.outline import BY_HAND, Plan, Route
from clipwise.gradients.walk import Node, node_name

_TRANSPOSE = (TRANSPOSE,)


@dataclass(frozen=True)
class Path:
    """From the tensor that a use took (an output of `source`) back to the parameters behind it."""

    source: Node
    number: int
    parameters: Mapping[str, torch.nn.Parameter]
    isometric: bool
    steps: tuple[str, ...] = ()  # the operations on the way of an isometric path
    nodes: tuple[Node, ...] = ()  # and their nodes; none on a way that is gone by hand

    @classmethod
    def identity(cls, name: str, parameter: torch.nn.Parameter) -> Path:
        """No way at all: the gradients are the parameter's own."""
        return cls(None, 0, {name: parameter}, True)

    @property
    def owner(self) -> str:
        """The one parameter at the end of an isometric path."""
        return next(iter(self.parameters))

    def pull(self, gradient: Tensor) -> dict[str, Tensor]:
        """Carry one gradient back on an isometric path, in its own precision.

        It is a sum over examples: to round it to the bfloat16 of a weight under autocast, as the engine
        would, moves it by 2^-9 of *its* norm, which is no function of one example.
        """
        if self.steps == _TRANSPOSE:
            gradient = gradient.t()
        for node in self.nodes:
            if node_name(node) not in CASTS:
                gradient = node(gradient)
        ((name, parameter),) = self.parameters.items()
        return {name: gradient.to(parameter.device)}

    def pull_each(self, gradients_b: Tensor) -> dict[str, Tensor]:
        """Carry the gradients of several examples back, each by itself: [b, ...]."""
        if not self.steps and self.isometric:
            return {self.owner: gradients_b}
        if self.steps == _TRANSPOSE:
            return {self.owner: gradients_b.mT if gradients_b.dim() == 3 else gradients_b}
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


class Paths:
    """The paths of all operands in one plan. Ways that are gone by hand hold no node, and serve every graph."""

    def __init__(self, plan: Plan) -> None:
        self._routes = plan.routes
        self._by_hand: list[dict[int, Path]] = []
        self._of: Mapping[str, torch.nn.Parameter] = {}
        every = [(k, j, way) for k, ways in enumerate(plan.routes) for j, way in ways.items()]
        self._through_nodes = [(k, j, way) for k, j, way in every if not _is_by_hand(way)]

    def through(
        self, order: list[Node], parameters: Mapping[str, torch.nn.Parameter]
    ) -> list[dict[int, Path]]:
        """Of each use, by operand, through the graph with these nodes."""
        if not self._of or any(parameters.get(name) is not p for name, p in self._of.items()):
            self._of = dict(parameters)
            self._by_hand = [
                {
                    j: Path(None, 0, {name: parameters[name] for name in way.parameters}, True, way.steps)
                    for j, way in ways.items()
                    if _is_by_hand(way)
                }
                for ways in self._routes
            ]
        if not self._through_nodes:
            return self._by_hand
        found = [dict(by_operand) for by_operand in self._by_hand]
        for k, j, way in self._through_nodes:
            behind = {name: parameters[name] for name in way.parameters}
            nodes = tuple(order[i] for i in way.places)
            found[k][j] = Path(order[way.source], way.number, behind, way.isometric, way.steps, nodes)
        return found


def _is_by_hand(way: Route) -> bool:
    return way.isometric and way.steps in BY_HAND
