"""One pass over the autograd graph of the losses: every use of every trainable parameter.

The graph is the tap: nothing is attached to the model. Each node is one of

    DERIVED  made of parameters alone (a parameter itself, its transpose, a normalised weight)
    DATA     carries an example axis

and a DATA node that takes a DERIVED tensor is a *use*. Whether a node that takes nothing but DERIVED
tensors from the graph is itself DERIVED cannot always be seen there: `w * mask` and `w * x` look alike
when x needs no gradient. Such a node is *open*; layout.py's probe decides it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from clipwise.errors import CoupledExamplesError, UnsupportedModelError

Node = Any  # torch exposes autograd nodes by duck type only
Edge = tuple[Node, int]  # one output of a node

ACCUMULATE = "torch::autograd::AccumulateGrad"


def named(*operations: str) -> frozenset[str]:
    """The names of these operations' backward nodes; overloads are numbered."""
    return frozenset(f"{name}Backward{number}" for name in operations for number in range(3))


# Functions of one tensor and of constants: DERIVED when that tensor is, whatever the batch holds.
PURE = named(
    *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Alias", "Unsqueeze", "Squeeze"),
    *("Clone", "ToCopy", "Slice", "Select", "Narrow", "Split", "SplitWithSizes", "Unbind", "Flip", "Movedim"),
    *("Neg", "Exp", "Log", "Sqrt", "Rsqrt", "Pow", "Abs", "Sigmoid", "Tanh", "Relu", "Softplus", "Softmax"),
    *("Sum", "Mean", "Norm", "LinalgVectorNorm", "Tril", "Triu"),
)

# Functions of nothing but the tensors that they take: DERIVED when all of those are in the graph and are.
CLOSED = PURE | named("Mm", "Bmm", "Addmm", "Add", "Sub", "Mul", "Div", "Cat", "Stack", "WeightNormInterface")

# Nodes that can move rows about in a way that depends on the data: no layout outlives its batch then.
ROW_MOVERS = named(
    *("Index", "IndexSelect", "IndexPut", "IndexPutImpl", "IndexAdd", "IndexCopy", "Gather", "Scatter"),
    *("ScatterAdd", "Sort", "Topk", "MaskedSelect", "MaskedScatter", "TakeAlongDim", "Take", "AsStrided"),
    *("PackPaddedSequence", "Embedding", "EmbeddingBag"),
) | {"torch::autograd::CopySlices"}

# Numbers by which a node cuts a tensor: the data may choose them, so they are part of the signature.
_CUTS = {
    "SelectBackward0": ("_saved_index",),
    "SliceBackward0": ("_saved_start", "_saved_end"),
    "SplitWithSizesBackward0": ("_saved_split_sizes",),
}


def node_name(node: Node) -> str:
    """The name under which torch knows the operation, such as AddmmBackward0."""
    name: str = node.name()
    return name


def parameters_behind(nodes: list[Node], names: Mapping[Node, str]) -> tuple[str, ...]:
    """The names of all parameters that feed these nodes, in alphabetical order."""
    reached: set[str] = set()
    entered: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node in entered:
            continue
        entered.add(node)
        if node in names:
            reached.add(names[node])
        stack.extend(child for child, _ in node.next_functions if child is not None)
    return tuple(sorted(reached))


@dataclass(eq=False)
class Use:
    """A DATA node and those of its inputs that are DERIVED: operand position -> (source node, output)."""

    node: Node
    index: int
    operands: dict[int, tuple[Node, int]]
    outputs: tuple[int, ...]

    def describe(self, names: Mapping[Node, str]) -> str:
        """For messages: the operation and the parameters that it takes."""
        reached = parameters_behind([source for source, _ in self.operands.values()], names)
        return f"{node_name(self.node)} (parameters: {', '.join(reached)})"


@dataclass(eq=False)
class Graph:
    """What one walk found. Holding the nodes keeps their identity (and this batch's graph) alive."""

    losses: Tensor
    order: list[Node]  # every node before those that it feeds
    names: dict[Node, str]  # accumulation node -> parameter name
    signature: tuple[object, ...]
    consumed: dict[Node, set[int]]  # which outputs of a node somebody takes
    moves_rows: bool
    uses: list[Use] = field(default_factory=list)
    open: list[tuple[Node, int]] = field(default_factory=list)
    taken_for_derived: list[tuple[Node, int]] = field(default_factory=list)

    def classify(self, decided: Mapping[int, bool]) -> None:
        """Find uses and open nodes; `decided` says of open nodes (by index) whether they carry data."""
        self.uses, self.open, self.taken_for_derived = [], [], []
        derived: set[Node] = set()
        for index, node in enumerate(self.order):
            if node in self.names:
                derived.add(node)
                continue
            inputs = [(j, n, nr) for j, (n, nr) in enumerate(node.next_functions) if n is not None]
            if not inputs:
                continue  # a leaf that is no parameter: an input that requires a gradient
            operands = {j: (n, nr) for j, n, nr in inputs if n in derived}
            if not operands:
                continue
            if len(operands) == len(inputs):
                if node_name(node) in CLOSED and len(inputs) == len(node.next_functions):
                    derived.add(node)
                    continue
                carries_data = decided.get(index)
                if carries_data is None:
                    self.open.append((node, index))
                if not carries_data:
                    self.taken_for_derived.append((node, index))
                    derived.add(node)
                    continue
            self.uses.append(Use(node, index, operands, tuple(sorted(self.consumed[node]))))
        if self.losses.grad_fn in derived and not self.open:
            raise CoupledExamplesError(
                "The losses cannot be told apart: nowhere between the parameters and the losses does a row "
                "belong to one example alone. Usual causes: batch statistics, subtracting a mean over the "
                "batch, a loss that compares examples. Compute each example's loss from that example alone."
            )


def walk(losses: Tensor, parameters: Mapping[str, torch.nn.Parameter]) -> Graph:
    """Every node between the losses and the trainable parameters, in topological order."""
    by_id = {id(p): name for name, p in parameters.items()}
    root: Node = losses.grad_fn
    order: list[Node] = []
    names: dict[Node, str] = {}
    position: dict[Node, int] = {}
    consumed: dict[Node, set[int]] = {root: {losses.output_nr}}
    signature: list[object] = []
    moves_rows = False
    alone: set[Node] = set()  # parameters and plain functions of one

    stack: list[tuple[Node, Any]] = [(root, iter(root.next_functions))]
    entered = {root}
    while stack:
        node, children = stack[-1]
        for child, number in children:
            if child is None:
                continue
            consumed.setdefault(child, set()).add(number)
            if child not in entered:
                entered.add(child)
                stack.append((child, iter(child.next_functions)))
                break
        else:
            stack.pop()
            name = node_name(node)
            if name == "CheckpointFunctionBackward":
                raise UnsupportedModelError(
                    "Reentrant activation checkpointing hides the parameters inside it. Call "
                    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False) instead."
                )
            if name == ACCUMULATE and id(node.variable) in by_id:
                names[node] = name = by_id[id(node.variable)]
            # Rows of a parameter belong to no example, and may be picked and cut as the data will.
            of_parameters = all(n in alone for n, _ in node.next_functions if n is not None)
            if node in names or (of_parameters and name in PURE):
                alone.add(node)
            moves_rows |= name in ROW_MOVERS and not of_parameters
            position[node] = len(order)
            order.append(node)
            inputs = tuple((-1 if n is None else position[n], nr) for n, nr in node.next_functions)
            signature.append((name, inputs, None if of_parameters else _cuts(node, name, len(losses))))

    missing = [name for name in parameters if name not in set(names.values())]
    if missing:
        raise UnsupportedModelError(
            f"Trainable parameter(s) {_some(missing)} take no part in the losses, so their private gradient "
            "would be pure noise. Freeze them with requires_grad_(False), or use them in the forward pass."
        )
    return Graph(losses, order, names, tuple(signature), consumed, moves_rows)


def _cuts(node: Node, name: str, batch: int) -> object:
    """Where a node cuts its input, if that may be along the examples."""
    if name == "RollBackward0":
        return node._saved_shifts
    if name not in _CUTS:
        return None
    sizes, dim = node._saved_self_sym_sizes, node._saved_dim
    size = sizes[dim if dim < len(sizes) else dim - 2**64]  # torch gives -1 in unsigned 64 bits
    return tuple(getattr(node, saved) for saved in _CUTS[name]) if size % batch == 0 else None


def _some(names: list[str], most: int = 5) -> str:
    shown = ", ".join(repr(n) for n in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def output_shape(node: Node, number: int) -> torch.Size:
    """The shape of one output of a node."""
    return torch.Size(node._input_metadata[number].shape)


def gradients_at(
    graph: Graph, edges: list[tuple[Node, int]], weights_B: Tensor, retain: bool
) -> dict[tuple[Node, int], Tensor]:
    """d(sum_i w_i loss_i) at the given outputs, in one backward pass that forms no weight gradient."""
    if not edges:
        return {}
    found = torch.autograd.grad(
        [graph.losses],
        [torch.autograd.graph.GradientEdge(node, number) for node, number in edges],
        grad_outputs=[weights_B],
        retain_graph=retain,
        allow_unused=True,
    )
    return {edge: _zeros(*edge) if g is None else g for edge, g in zip(edges, found, strict=True)}


def _zeros(node: Node, number: int) -> Tensor:
    meta = node._input_metadata[number]
    return torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)
