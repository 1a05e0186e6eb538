"""Whether outputs were made by the graph that the bounds were derived from.

A model may do one thing when it is traced and another in training: a branch on a flag, a layer that is skipped,
autocast, an input that went around the clip. What autograd recorded tells. It is compared, node by node, with what
it records for the traced graph on a few synthetic examples: the operations and their settings, the parameters,
the shapes, and that every input went through `ClipInput` (or is ids).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.errors import UnsupportedModelError
from clipwise.layers.clip_input import ClipInput
from clipwise.lipschitz.pattern import NOT_PLAIN, Pattern, Spot, plain, saved_names
from clipwise.lipschitz.trace import Network

Node = torch.autograd.graph.Node
Shape = tuple[int, ...]
_CLIPPED = "ClippedInputBackward"
_EXAMPLES = (2, 3)  # two numbers of them tell which sizes grow with the examples


class GraphMatch:
    """Compares the graph of some outputs with that of a traced network.

    The comparison holds for the mode (training or evaluation) of the model at that moment, and costs a walk over
    the nodes of the graph: well below a millisecond for small networks.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._modules = list(network.graph.modules())
        self._expected: dict[tuple[Any, ...], tuple[list[Any], Pattern | None]] = {}
        self._owners = {id(p): name for name, p in network.graph.named_parameters()}

    def require(self, outputs: Tensor) -> None:
        """Refuse outputs that other operations made than those that were bounded."""
        if outputs.grad_fn is None:
            raise UnsupportedModelError(
                "outputs: no gradient leads back from them. Give what the model returned, with gradients enabled."
            )
        if tuple(outputs.shape[1:]) != self._network.output_shape:
            raise UnsupportedModelError(
                "outputs: an example has another shape than the bounds are for, which is "
                f"{self._network.output_shape}. Give what the model returned."
            )
        examples = len(outputs)
        if examples == 0:
            return  # an empty batch has no gradients to bound
        # Of a single example torch lays out sequences otherwise, with other views.
        expected, pattern = self._of_the_trace(outputs.device, is_single=examples == 1)
        try:
            if pattern is not None and pattern.fits(outputs.grad_fn, examples):
                return
            found = self._described(outputs.grad_fn)
        except RuntimeError as error:
            raise UnsupportedModelError(
                "outputs: their graph was used up, or weights were changed since the model ran: the bounds are for "
                "the weights of now. Run the model again."
            ) from error
        for place, (description, other) in enumerate(zip(expected, found, strict=False)):
            one = _for_examples(description, examples)
            if one != other:
                same = ", with other shapes or inputs" if _told(one) == _told(other) else ""
                raise UnsupportedModelError(
                    f"outputs: operation {place} from the end is {_told(other)}{same}, where the traced model "
                    f"has {_told(one)}. The bounds hold for the traced model only: give what that model returned, "
                    "without autocast, compilation or branches that differ between calls."
                )
        if len(expected) != len(found):
            raise UnsupportedModelError(
                f"outputs: {len(found)} operations made them, where the traced model has {len(expected)}. The bounds "
                "hold for the traced model only: give what that model returned."
            )

    def _of_the_trace(self, device: torch.device, is_single: bool) -> tuple[list[Any], Pattern | None]:
        """Each node with sizes as (a, b): for n examples a + b n. And the same as a pattern."""
        key = (*[m.training for m in self._modules], device, is_single)
        if key not in self._expected:
            few, more = (1, 1) if is_single else _EXAMPLES
            root = self._run(device, few)
            one, other = self._described(root), self._described(self._run(device, more))
            expected = [
                (*a[:2], tuple(_growing(m, n, few, more) for m, n in zip(a[2], b[2], strict=True)), *a[3:])
                for a, b in zip(one, other, strict=True)
            ]
            self._expected[key] = expected, _pattern(_nodes(root), expected)
        return self._expected[key]

    def _run(self, device: torch.device, examples: int) -> Node:
        # Bounds are for the type of the weights: under autocast other operations would run, here as in the model.
        no_autocast = torch.autocast(device.type, enabled=False)
        with torch.random.fork_rng(enabled=True), torch.enable_grad(), no_autocast:
            outputs = self._network.graph(self._examples(device, examples))
        root: Node = outputs.grad_fn
        return root

    def _examples(self, device: torch.device, examples: int) -> Tensor:
        shape = (examples, *self._network.input_shape)
        takes_numbers = any(isinstance(m, ClipInput) for m in self._network.graph.modules())
        kind = next(self._network.graph.parameters()).dtype if takes_numbers else torch.long
        return torch.zeros(shape, dtype=kind, device=device)

    def _described(self, root: Node) -> list[Any]:
        """Every node once, with what it does and where it leads."""
        nodes = _nodes(root)
        order = {node: place for place, node in enumerate(nodes)}
        return [self._of_node(node, order) for node in nodes]

    def _of_node(self, node: Node, order: Mapping[Node, int]) -> tuple[Any, ...]:
        if _is_clip(node):
            clip: Any = node
            leads = tuple((None if f is None else order[f], 0) for f in _behind(node))
            return (_CLIPPED, leads, (), (("max_norm", clip.max_norm), ("shape", clip.example_shape)))
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter):
            return ("parameter", (), (), (("name", self._owners.get(id(variable), "unknown")),))
        leads = tuple((None if f is None else order[f], index) for f, index in node.next_functions)
        shapes = tuple(tuple(m.shape) for m in node._input_metadata)
        return (node.name(), leads, shapes, _settings(node))


def _nodes(root: Node) -> list[Node]:
    """Every node once, in an order that the graph alone decides."""
    nodes, entered = [root], {root, None}
    for node in nodes:  # grows on the way
        for following in _behind(node):
            if following is not None and following not in entered:
                entered.add(following)
                nodes.append(following)
    return nodes


def _pattern(nodes: list[Any], expected: list[Any]) -> Pattern | None:
    """The traced graph for a quick comparison; None where something trained lies before a clip."""
    spots = []
    for node, (_, leads, sizes, settings) in zip(nodes, expected, strict=True):
        is_clip, variable, known = _is_clip(node), getattr(node, "variable", None), dict(settings)
        if is_clip and leads:
            return None
        spots.append(
            Spot(
                kind=type(node),
                name="" if type(node).__name__ == node.name() else node.name(),
                leads=leads,
                parameter=variable if isinstance(variable, nn.Parameter) else None,
                clip=(known["max_norm"], known["shape"]) if is_clip else None,
                sizes=sizes,
                settings=tuple((name, known.get(name, NOT_PLAIN)) for name in saved_names(node)),
            )
        )
    return Pattern(spots)


def _settings(node: Node) -> tuple[tuple[str, Any], ...]:
    """The numbers that an operation keeps, such as stride or slope, but for sizes."""
    found = ((name, plain(getattr(node, name))) for name in saved_names(node))
    return tuple((name, value) for name, value in found if value is not NOT_PLAIN)


def _growing(one: Shape, other: Shape, few: int, more: int) -> tuple[tuple[int, int], ...]:
    """From the sizes for two numbers of examples: a + b n."""
    if few == more:
        return tuple((m, 0) for m in one)
    slopes = [(n - m) // (more - few) for m, n in zip(one, other, strict=True)]
    return tuple((m - b * few, b) for m, b in zip(one, slopes, strict=True))


def _for_examples(description: Any, examples: int) -> tuple[Any, ...]:
    """What is expected of a node, for so many examples."""
    name, leads, shapes, settings = description
    return name, leads, tuple(tuple(a + b * examples for a, b in shape) for shape in shapes), settings


def _told(description: Any) -> str:
    """An operation in words, without the sizes of what it made: examples may lie along any axis."""
    name, _, _, settings = description
    extra = ", ".join(f"{k.removeprefix('_saved_')}={v}" for k, v in settings)
    return f"{name.removesuffix('Backward0')}{f' ({extra})' if extra else ''}"


def _behind(node: Node) -> list[Node | None]:
    """Where gradients go on. Behind a clip only what leads to a parameter matters: values are bounded after it."""
    found = [following for following, _ in node.next_functions]
    if not _is_clip(node):
        return found
    return [found[0]] if _leads_to_parameter(found[0]) else []  # the other one is the anchor


def _leads_to_parameter(node: Node | None) -> bool:
    entered, stack = {None, node}, [] if node is None else [node]
    while stack:
        here = stack.pop()
        if isinstance(getattr(here, "variable", None), nn.Parameter):
            return True
        following = {f for f, _ in here.next_functions} - entered
        entered |= following
        stack += [f for f in following if f is not None]
    return False


def _is_clip(node: Node) -> bool:
    return node.name() == _CLIPPED
