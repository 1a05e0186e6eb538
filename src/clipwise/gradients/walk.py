"""One pass over the autograd graph of the losses, which finds every use of every trainable parameter.

Nothing is attached to the model. Each node of the graph is one of

    DERIVED  computed from parameters alone (a parameter, its transpose, a normalised weight)
    DATA     carries an example axis

A DATA node that takes a DERIVED tensor is a *use*. The graph cannot always show whether a node that takes only DERIVED
tensors is itself DERIVED: `w * mask` and `w * x` look alike if x needs no gradient. Such a node is *open*, and a probe
decides (layout.py).

Most graphs have the same outline (outline.py) as the previous one. A new graph is first compared with recent outlines,
node by node, and walked only if it differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from clipwise.errors import CoupledExamplesError, UnreachedParametersError, UnsupportedModelError
from clipwise.gradients.outline import (
    ACCUMULATE,
    CASTS,
    CLOSED,
    COMPILED,
    CROSSES,
    CUTS,
    PURE,
    REFUSALS,
    ROW_MOVERS,
    TRANSPOSE,
    TURNS,
    GraphPlan,
    Outline,
    OutlineEntry,
    UsePlan,
    require_not_rerun,
)

Node = Any  # torch exposes autograd nodes by duck type only
Edge = tuple[Node, int]  # one output of a node
Place = tuple[int, int]  # the same in every graph of an outline: the index of the node, and the output

USUAL_CAUSES = (
    "Usual causes: batch statistics, subtracting a mean over the batch, a loss that compares examples. Compute each "
    "example's loss from that example alone."
)
_RECENT = 3  # outlines that a new graph is compared with
_MOST_OUTLINES = 512


def node_name(node: Node) -> str:
    """torch's name of the operation, such as AddmmBackward0."""
    name: str = node.name()
    return name


def graph_nodes(root: Node, end: Node = None) -> Iterator[Node]:
    """The root and all nodes that feed it, each once; not `end`, nor what only `end` leads to."""
    entered, stack = {root, end}, [] if root is end else [root]
    while stack:
        node = stack.pop()
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in entered:
                entered.add(child)
                stack.append(child)


def behind(nodes: Iterable[Node]) -> set[Node]:
    """All nodes that feed these."""
    found: set[Node] = set()
    stack = list(nodes)
    while stack:
        for child, _ in stack.pop().next_functions:
            if child is not None and child not in found:
                found.add(child)
                stack.append(child)
    return found


def parameters_behind(nodes: list[Node], names: Mapping[Node, str]) -> tuple[str, ...]:
    """The names of all parameters that feed these nodes, sorted."""
    return tuple(sorted(names[node] for node in {*nodes, *behind(nodes)} & names.keys()))


@dataclass(eq=False)
class Use:
    """A DATA node and its DERIVED inputs: operand position -> (source node, output)."""

    node: Node
    index: int
    operands: dict[int, tuple[Node, int]]
    outputs: tuple[int, ...]
    shapes: dict[int, torch.Size]  # of the operands
    output_shapes: list[torch.Size]

    def describe(self, names: Mapping[Node, str]) -> str:
        """The operation and its parameters, for messages."""
        reached = parameters_behind([source for source, _ in self.operands.values()], names)
        return f"{node_name(self.node)} (parameters: {', '.join(reached)})"


@dataclass(eq=False)
class Graph:
    """The result of one walk. It keeps the nodes, and therefore the batch's graph, alive."""

    losses: Tensor
    order: list[Node]  # each node after the nodes that feed it
    outline: Outline
    uses: list[Use] = field(default_factory=list)
    plan: GraphPlan = field(init=False)  # set by `classify`

    @cached_property
    def names(self) -> dict[Node, str]:
        """Maps accumulation nodes to parameter names."""
        return {self.order[i]: name for i, name in self.outline.parameters.items()}

    def classify(self, decided: Mapping[int, bool]) -> None:
        """Find uses and open nodes. `decided` maps open nodes (by index) to whether they carry data."""
        self.follow(self.outline.plan(decided))
        if self.plan.is_coupled:
            raise CoupledExamplesError(
                "The losses do not separate into examples: between the parameters and the losses, no row belongs to "
                f"one example alone. {USUAL_CAUSES}"
            )

    def follow(self, plan: GraphPlan) -> None:
        """Find the uses of a plan."""
        self.plan, self.uses = plan, [self._use(found) for found in plan.uses]

    def _use(self, found: UsePlan) -> Use:
        node = self.order[found.index]
        operands = {j: (self.order[i], k) for j, (i, k) in found.operands.items()}
        shapes = {j: output_shape(*source) for j, source in operands.items()}
        output_shapes = [output_shape(node, k) for k in found.outputs]
        return Use(node, found.index, operands, found.outputs, shapes, output_shapes)


class Outlines:
    """The outlines of earlier graphs."""

    def __init__(self) -> None:
        self._recent: list[Outline] = []
        self._known: dict[Outline, Outline] = {}

    def walk(self, losses: Tensor, parameters: Mapping[str, torch.nn.Parameter]) -> Graph:
        """Like the function `walk`; graphs of one kind share one outline."""
        for outline in self._recent:
            order = _followed(outline, losses, parameters)
            if order is not None:
                break
        else:
            if len(self._known) >= _MOST_OUTLINES:
                self._known.clear()  # an unrolled network has a new graph for each sequence length
            graph = walk(losses, parameters)
            _require_open(graph.outline)
            order, outline = graph.order, self._known.setdefault(graph.outline, graph.outline)
        if not self._recent or self._recent[0] is not outline:
            others = [other for other in self._recent if other is not outline]
            self._recent = [outline, *others[: _RECENT - 1]]
        graph = Graph(losses, order, outline)
        if outline.settled is not None:
            graph.follow(outline.settled)
        return graph


def _require_open(outline: Outline) -> None:
    """Raise for a compiled region that takes parameters: per-example gradients inside it are inaccessible."""
    entries = outline.entries
    for entry in entries:
        if entry.name == COMPILED and any(i >= 0 and entries[i].inputs is None for i, _ in entry.inputs or ()):
            raise UnsupportedModelError(REFUSALS[COMPILED])


def _followed(outline: Outline, losses: Tensor, parameters: Mapping[str, torch.nn.Parameter]) -> list[Node] | None:
    """The nodes of a graph at the places of an outline, or None if the graph has a different outline.

    Places are visited from the losses on, so that the node of each place is known when it is reached. Each place must
    have one node, and different places must have different nodes. (A leaf that was not a parameter is not one now: the
    number of parameters is unchanged, and each has its own place.)
    """
    if losses.output_nr != outline.output or len(parameters) != len(outline.parameters):
        return None
    order: list[Node] = [None] * len(outline.entries)
    order[-1] = losses.grad_fn
    for index, name, inputs in outline.backwards:
        node = order[index]
        if inputs is None:
            if node.name() != ACCUMULATE or node.variable is not parameters.get(name):
                return None
            continue
        children = node.next_functions
        if node.name() != name or len(children) != len(inputs):
            return None
        for child_and_number, (place, number) in zip(children, inputs, strict=True):
            child = child_and_number[0]
            if child_and_number[1] != number or (child is None) != (place < 0):
                return None
            if child is not None:
                if order[place] is None:
                    order[place] = child
                elif order[place] is not child:
                    return None
    if len(set(order)) < len(order):
        return None
    for index in outline.cutting:
        entry = outline.entries[index]
        if _cuts(order[index], entry.name, len(losses)) != entry.cuts:
            return None
    return order


def walk(losses: Tensor, parameters: Mapping[str, torch.nn.Parameter]) -> Graph:
    """Every node between the losses and the trainable parameters, in topological order."""
    by_id = {id(p): name for name, p in parameters.items()}
    root: Node = losses.grad_fn
    order: list[Node] = []
    position: dict[Node, int] = {}
    entries: list[OutlineEntry] = []
    cutting: list[int] = []
    movers: list[int] = []
    alone: set[int] = set()  # parameters, and functions of parameters alone

    stack: list[tuple[Node, Any, Any]] = [(root, root.next_functions, iter(root.next_functions))]
    entered = {root}
    while stack:
        node, children, left = stack[-1]
        for child, _ in left:
            if child is not None and child not in entered:
                entered.add(child)
                grandchildren = child.next_functions
                stack.append((child, grandchildren, iter(grandchildren)))
                break
        else:
            stack.pop()
            name, index = node_name(node), len(order)
            position[node] = index
            order.append(node)
            if name == ACCUMULATE and id(node.variable) in by_id:
                alone.add(index)
                entries.append(OutlineEntry(by_id[id(node.variable)], None))
                continue
            inputs = tuple((-1 if n is None else position[n], nr) for n, nr in children)
            # Rows of a parameter belong to no example; the data may select and split them freely.
            of_parameters = all(place in alone for place, _ in inputs if place >= 0)
            if of_parameters and (name in PURE or (name in CLOSED and all(place >= 0 for place, _ in inputs))):
                alone.add(index)
            elif name in ROW_MOVERS and not of_parameters:
                movers.append(index)
            cuts = None
            if name in TURNS if of_parameters else name in CUTS or name == "RollBackward0":
                cutting.append(index)
                cuts = _cuts(node, name, len(losses))
            elif of_parameters and name in CASTS:  # not compared: a parameter keeps its dtype
                cuts = CROSSES if _crosses(node) else None
            entries.append(OutlineEntry(name, inputs, cuts))

    require_not_rerun(*(entry.name for entry in entries if entry.inputs is not None))
    reached = {entry.name for entry in entries if entry.inputs is None}
    if missing := tuple(name for name in parameters if name not in reached):
        raise UnreachedParametersError(missing)
    return Graph(losses, order, Outline(tuple(entries), losses.output_nr, tuple(cutting), tuple(movers)))


def _cuts(node: Node, name: str, batch: int) -> object:
    """Where a node splits its input, if possibly along the examples; or whether it transposes a weight."""
    if name in TURNS:
        return TRANSPOSE if _transposes(node, name) else None
    if name == "RollBackward0":
        return node._saved_shifts
    sizes, dim = node._saved_self_sym_sizes, node._saved_dim
    size = sizes[dim if dim < len(sizes) else dim - 2**64]  # torch returns -1 as unsigned 64 bits
    return tuple(getattr(node, saved) for saved in CUTS[name]) if size % batch == 0 else None


def _crosses(node: Node) -> bool:
    """Whether a cast converts between real and complex numbers."""
    return dtype_at(node, 0).is_complex != dtype_at(*node.next_functions[0]).is_complex


def _transposes(node: Node, name: str) -> bool:
    """Whether a node transposes a matrix. (torch returns -1 as unsigned 64 bits, which is odd as well.)"""
    if len(output_shape(node, 0)) != 2:
        return False
    if name == "PermuteBackward0":
        return bool(node._saved_dims[0] % 2)
    return bool((node._saved_dim0 - node._saved_dim1) % 2)


def output_shape(node: Node, number: int) -> torch.Size:
    """The shape of one output of a node."""
    return torch.Size(node._input_metadata[number].shape)


def dtype_at(node: Node, number: int) -> torch.dtype:
    """The dtype of one output of a node."""
    dtype: torch.dtype = node._input_metadata[number].dtype
    return dtype


def gradients_at(
    graph: Graph, edges: list[tuple[Node, int]], weights_B: Tensor, retain: bool
) -> dict[tuple[Node, int], Tensor]:
    """d(sum_i w_i loss_i) at the given outputs, from one backward pass that computes no weight gradients."""
    if not edges:
        return {}
    found = torch.autograd.grad(
        [graph.losses],
        [GradientEdge(node, number) for node, number in edges],
        grad_outputs=[weights_B],
        retain_graph=retain,
        allow_unused=True,
    )
    return {edge: zeros_at(*edge) if g is None else g for edge, g in zip(edges, found, strict=True)}


def zeros_at(node: Node, number: int) -> Tensor:
    """The gradient at an output that no gradient reaches."""
    meta = node._input_metadata[number]
    return torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)
