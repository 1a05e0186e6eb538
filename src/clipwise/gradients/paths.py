"""From the gradients of single uses to the gradients of parameters.

A use gives gradients with respect to its input tensor, which may be made of parameters: transposes, views, casts,
normalised or adapted weights. If that tensor is a view of one parameter (an *isometric* path), the norm is the
parameter's own, and only the weighted sum is carried back. Otherwise each example's gradient is written out and carried
back separately.

All uses of a parameter are joined before any norm is taken. |g1 + g2|^2 is not |g1|^2 + |g2|^2: a tied weight or a
module called twice needs the cross terms. Products (or rows) are joined by concatenating their positions, a product and
rows of one table by their cross term (forms/tied.py). All other uses are written out per example and added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from clipwise.gradients.forms import Form, Outer, Rows, Tied, Written
from clipwise.gradients.operations import CASTS, TRANSPOSE
from clipwise.gradients.outline import BY_HAND, Route
from clipwise.gradients.walk import Graph, Node, dtype_at, node_name

_TRANSPOSE = (TRANSPOSE,)


@dataclass(eq=False)
class Path:
    """From the input tensor of a use (an output of `source`) back to the parameters behind it."""

    source: Node
    number: int
    parameters: Mapping[str, torch.nn.Parameter]
    isometric: bool
    steps: tuple[str, ...] = ()  # the operations of an isometric path
    nodes: tuple[Node, ...] = ()  # their nodes; empty if autograd is not needed

    @classmethod
    def identity(cls, name: str, parameter: torch.nn.Parameter) -> Path:
        """The empty path: the gradients are the parameter's own."""
        return cls(None, 0, {name: parameter}, True)

    def pull(self, gradient: Tensor) -> dict[str, Tensor]:
        """Carry one gradient back on an isometric path, in its own precision.

        It is a sum over examples. Rounding it to the bfloat16 of a weight under autocast, as autograd would, changes it
        by 2^-9 of *its* norm, which depends on all examples.
        """
        if self.steps == _TRANSPOSE:
            gradient = gradient.t()
        for node in self.nodes:
            if node_name(node) not in CASTS:
                gradient = node(gradient)
        ((name, parameter),) = self.parameters.items()
        return {name: gradient.to(parameter.device)}

    def pull_each(self, gradients_b: Tensor) -> dict[str, Tensor]:
        """Carry the gradients of several examples back, each separately: [b, ...]."""
        if self.isometric and self.steps in BY_HAND:
            transposes = self.steps == _TRANSPOSE and gradients_b.dim() == 3
            return dict.fromkeys(self.parameters, gradients_b.mT if transposes else gradients_b)
        gradients_b = gradients_b.to(dtype_at(self.source, self.number))
        try:
            found = self._backward(gradients_b, batched=True)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # torch cannot batch an operation of the path
            each = [self._backward(g, batched=False) for g in gradients_b]
            found = tuple(torch.stack(grads) for grads in zip(*each, strict=True))
        return dict(zip(self.parameters, found, strict=True))

    def _backward(self, gradient: Tensor, batched: bool) -> tuple[Tensor, ...]:
        edge = torch.autograd.graph.GradientEdge(self.source, self.number)
        targets = list(self.parameters.values())
        return torch.autograd.grad(
            [edge], targets, [gradient], retain_graph=True, is_grads_batched=batched, materialize_grads=True
        )


def paths_in(graph: Graph, parameters: Mapping[str, torch.nn.Parameter]) -> list[dict[int, Path]]:
    """For each use, the paths of its operands. Paths without autograd keep no node of the graph alive."""

    def path(way: Route) -> Path:
        behind = {name: parameters[name] for name in way.parameters}
        if way.is_by_hand:
            return Path(None, 0, behind, True, way.steps)
        nodes = tuple(graph.order[i] for i in way.places)
        return Path(graph.order[way.source], way.number, behind, way.isometric, way.steps, nodes)

    return [{j: path(way) for j, way in ways.items()} for ways in graph.plan.routes]


class Contribution(NamedTuple):
    """The gradients of one use with respect to one tensor, and that tensor's path to the parameters."""

    form: Form
    path: Path


def joined(name: str, parameter: torch.nn.Parameter, uses: list[Contribution]) -> Contribution:
    """One contribution from several uses of a parameter, or from one use with a path that is not isometric."""
    if all(c.path.isometric for c in uses):
        forms = [_upright(c) for c in uses]
        form = _side_by_side([f for f in forms if f is not None]) if None not in forms else None
        if form is not None:
            return Contribution(form, Path.identity(name, parameter))
    return written_out(name, parameter, parameter.dtype, uses)


def written_out(name: str, parameter: torch.nn.Parameter, dtype: torch.dtype, uses: list[Contribution]) -> Contribution:
    """The sum of all uses of one parameter, written out per example."""

    def make(examples: slice) -> Tensor:
        each = (c.path.pull_each(c.form.instantiate(examples))[name] for c in uses)
        total = next(each)
        for gradients in each:
            total = total + gradients
        return total

    written = Written(uses[0].form.batch, parameter.shape, dtype, make)
    return Contribution(written, Path.identity(name, parameter))


def _upright(c: Contribution) -> Form | None:
    """The form with respect to the parameter itself, if the path is empty or a transpose."""
    if c.path.steps == ():
        return c.form
    if c.path.steps == (TRANSPOSE,) and isinstance(c.form, Outer):
        return Outer(c.form.right, c.form.left)
    return None


def _side_by_side(forms: list[Form]) -> Form | None:
    """Concatenates the positions of products, and the entries of lookups, in one form of each kind."""
    outers = [f for f in forms if isinstance(f, Outer)]
    rows = [f for f in forms if isinstance(f, Rows)]
    if len(outers) + len(rows) < len(forms) or len({f.V for f in rows}) > 1:
        return None  # some index whole rows, others single entries
    outer = _one_product(outers) if outers else None
    table = _one_table(rows) if rows else None
    if outer is None or table is None:
        return outer or table
    return Tied(outer, table) if outer.shape == table.shape and outer.shape[0] == table.V else None


def _one_product(outers: list[Outer]) -> Outer:
    if len(outers) == 1:
        left, right = outers[0].left, outers[0].right
    else:
        left, right = (torch.cat(parts, 1) for parts in zip(*((f.left, f.right) for f in outers), strict=True))
    return Outer(left, right, outers[0].shape, upright=True)


def _one_table(rows: list[Rows]) -> Rows:
    if len(rows) == 1:
        return rows[0]
    entries = zip(*((f.example, f.ids, f.g) for f in rows), strict=True)
    example, ids, g = (torch.cat(parts) for parts in entries)
    each = sum(f.each for f in rows if f.each is not None) if all(f.each for f in rows) else None
    return Rows(example, ids, g, rows[0].batch, rows[0].shape, each)
