"""A graph of autograd that others are compared with, in one walk and without a word about what differs.

This is for every step, in which the graphs are alike. `matching` finds the words when they are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Node = torch.autograd.graph.Node
Sizes = Sequence[Sequence[tuple[int, int]]]  # of what enters a node: (a, b) for a + b n, for n examples

NOT_PLAIN = object()  # of a value that is no setting, such as a tensor of activations
_PLAIN = (bool, int, float, str)
_FOLLOWS = (
    "_sym_",
    "_sizes",
    "_strides",
    "_options",
)  # what is saved of shapes, which are compared themselves


class Spot(NamedTuple):
    """What one node of the graph is.

    Args:
        kind: its type. Operations of torch have one each, but for some that are told by `name` alone.
        name: "" where the type says it.
        leads: for each gradient that it gives, the number of the node that takes it, and as which of its inputs.
        parameter: that gathers its gradient here, if it is a leaf.
        clip: norm and shape of the clip, if it is one of the inputs. What was before it does not matter.
        sizes: of the gradients that it takes.
        settings: what it keeps by name, `NOT_PLAIN` for tensors.
    """

    kind: Any
    name: str
    leads: tuple[tuple[int | None, int], ...]
    parameter: nn.Parameter | None
    clip: tuple[float, tuple[int, ...]] | None
    sizes: Sizes
    settings: tuple[tuple[str, Any], ...]


class Pattern:
    """The nodes of a graph in the order in which a walk from its root meets them."""

    def __init__(self, spots: Sequence[Spot]) -> None:
        self._spots = list(spots)
        self._sizes: dict[int, list[list[list[int]]]] = {}

    def fits(self, root: Node, examples: int) -> bool:
        """Whether a graph for so many examples has these nodes, wired and set like this, and no others."""
        if examples not in self._sizes:
            self._sizes = {examples: [_for_examples(spot.sizes, examples) for spot in self._spots]}
        order: dict[Any, int] = {root: 0}
        nodes: list[Any] = [root]
        for spot, sizes, node in zip(self._spots, self._sizes[examples], nodes, strict=False):  # nodes grow
            if type(node) is not spot.kind or (spot.name and node.name() != spot.name):
                return False
            if spot.parameter is not None:
                if node.variable is not spot.parameter:
                    return False
                continue
            following = node.next_functions
            if spot.clip is not None:
                if (node.max_norm, node.example_shape) != spot.clip or following[0][0] is not None:
                    return False
                continue
            if len(following) != len(spot.leads):
                return False
            for (child, index), lead in zip(following, spot.leads, strict=True):
                if child is not None and child not in order:
                    order[child] = len(nodes)
                    nodes.append(child)
                if (None if child is None else order[child], index) != lead:
                    return False
            if [m.shape for m in node._input_metadata] != sizes:
                return False
            for name, value in spot.settings:
                if plain(getattr(node, name)) != value:
                    return False
        return len(nodes) == len(self._spots)


_SAVED: dict[type, tuple[str, ...]] = {}  # to list a node's attributes takes longer than to read them


def saved_names(node: Any) -> tuple[str, ...]:
    """What a node keeps, but for sizes."""
    kind = type(node)
    if kind not in _SAVED:
        names = (name for name in dir(node) if name.startswith("_saved_"))
        _SAVED[kind] = tuple(name for name in names if not any(word in name for word in _FOLLOWS))
    return _SAVED[kind]


def plain(value: Any) -> Any:
    """A number, a word or a tuple of numbers that a node keeps, such as stride or slope; `NOT_PLAIN` of all else."""
    if isinstance(value, Tensor):
        # Without dimensions it may be a number of the code, such as the 2 of `2 * x`.
        is_number = value.ndim == 0 and value.device.type == "cpu" and not value.requires_grad
        return value.item() if is_number and not isinstance(value, nn.Parameter) else NOT_PLAIN
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (tuple, list)) and all(isinstance(v, (bool, int, float)) for v in value):
        return tuple(value)
    return NOT_PLAIN


def _for_examples(sizes: Sizes, examples: int) -> list[list[int]]:
    return [[a + b * examples for a, b in shape] for shape in sizes]
