"""Checks that a model still computes what was traced, and that outputs were computed by the traced graph.

The bounds depend on the constants, layers and tensors of the trace. The autograd graph does not show all of them, for
example the 3 of x + 3, or a replaced frozen tensor. So everything that a forward pass may read from the modules is
recorded and compared in every step. On a difference the model is traced again: the bounds stay valid if the operations,
layers and tensors are the same, and otherwise the model is refused.

A model with constants that autograd does not show (from a global variable, say), or with unused layers that it could
switch to, is traced in every step.

The autograd graph of the outputs is compared, node by node, with the graph that autograd records for the traced model
on a few synthetic examples: operations and their settings, parameters, shapes, and that every input passed through
`ClipInput` (or is ids). It shows branches, skipped layers, autocast, and inputs that bypass the clip.
"""

from __future__ import annotations

import dataclasses
import numbers
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from clipwise.errors import StepError, UnsupportedModelError
from clipwise.gradients.outline import ACCUMULATE
from clipwise.gradients.walk import graph_nodes
from clipwise.layers.bounded import ClipInput
from clipwise.layers.clipped.layer import HOOKS
from clipwise.lipschitz.forward_graph import GraphStep, attribute_of, graph_again, steps_of
from clipwise.lipschitz.rule_tables import require_no_global_hooks
from clipwise.lipschitz.trace import Network

_OF_TORCH = frozenset(vars(nn.Module()))  # torch's own attributes, compared separately
_PLAIN = (numbers.Number, str, type(None), torch.dtype, torch.device)
_ADDS = (operator.add, operator.iadd, torch.add, "add", operator.sub, torch.sub, "sub")
_DROPS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_UNTRACED = "a tensor that is not in the trace"

Look = tuple[bool, list[Any]]  # of one module: its mode, and everything else


class AsTraced:
    """Records the state of a model and refuses the model if it would no longer compute its trace.

    All attributes are compared by value, a few microseconds per module; a new trace takes some milliseconds.
    """

    def __init__(self, model: nn.Module, network: Network) -> None:
        self._model, self._network = model, network
        traced = (*network.graph.parameters(), *network.graph.buffers())
        self._tensors = {id(t) for t in traced}  # the network keeps them alive, so ids stay unique
        names = [str(n.target) for n in network.graph.graph.nodes if n.op == "call_module"]
        self._layers = {name: network.graph.get_submodule(name) for name in names}
        self._first = {name: self._look_at(layer)[1] for name, layer in self._layers.items()}
        self._always_traces = any(map(_hides_a_number, network.steps)) or self._has_choices()
        self._remember()

    def require(self) -> None:
        """Compare the model with its trace; trace it again if something differs."""
        require_no_global_hooks()
        if not self._always_traces and [self._look_at(m) for m in self._modules] == self._seen:
            return
        self._require_same_layers()
        self._require_same_graph(graph_again(self._model))
        self._remember()

    def _has_choices(self) -> bool:
        """Whether the model has layers outside the trace that another pass could use without a sign in autograd."""
        is_taken = {id(layer) for layer in self._layers.values()}
        return any(
            (isinstance(m, _DROPS) and id(m) not in is_taken)
            or any(id(p) not in self._tensors for p in m.parameters(recurse=False))
            for m in self._model.modules()
        )

    def _remember(self) -> None:
        self._modules = list(self._model.modules())
        # Holding objects keeps their ids unique. Tensors are not held: they may be a whole batch.
        self._held = [v for m in self._modules for v in vars(m).values() if not isinstance(v, Tensor)]
        self._seen = [self._look_at(m) for m in self._modules]

    def _look_at(self, module: nn.Module) -> Look:
        tensors = [*module._parameters.items(), *module._buffers.items()]
        own = [(name, value) for name, value in vars(module).items() if name not in _OF_TORCH]
        found = [(name, self._key(value)) for name, value in (*tensors, *own)]
        modules = [(name, id(child)) for name, child in module._modules.items()]
        return module.training, [type(module), found, modules, [bool(getattr(module, hooks)) for hooks in HOOKS]]

    def _key(self, value: Any) -> Any:
        """Plain values by value, containers by contents, and other objects by identity."""
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, (Tensor, fx.Proxy)):
            return id(value) if id(value) in self._tensors else _UNTRACED
        if isinstance(value, dict):
            return [(k, self._key(v)) for k, v in value.items()]
        if isinstance(value, (list, tuple)):
            return [self._key(v) for v in value]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._key(vars(value)) if hasattr(value, "__dict__") else id(value)
        return id(value)

    def _require_same_layers(self) -> None:
        for name, layer in self._layers.items():
            if attribute_of(self._model, name) is not layer:
                raise _replaced(f"Layer {name!r}")
            _, now = self._look_at(layer)
            if now != self._first[name]:
                raise StepError(
                    f"Settings, hooks or tensors of layer {name!r} ({type(layer).__name__}) were changed after "
                    "make_private, so the bounds no longer hold: make a new private run."
                )

    def _require_same_graph(self, again: fx.Graph) -> None:
        for name in [str(node.target) for node in again.nodes if node.op == "get_attr"]:
            if attribute_of(self._model, name) is not attribute_of(self._network.graph, name):
                raise _replaced(f"The tensor {name!r}")
        before, now = self._network.steps, tuple(steps_of(again))
        if now == before:
            return
        one, other = next(pair for pair in zip(before, now, strict=False) if pair[0] != pair[1])
        raise StepError(
            f"The model's forward pass differs from its trace: {other.words}, where it had {one.words}. The bounds "
            "hold for the trace only: restore what it reads, or make a new private run."
        )


def _hides_a_number(step: GraphStep) -> bool:
    """The 3 of x + 3, and the rate of a dropout: autograd graphs do not show them."""
    adds = step.target in _ADDS and any(isinstance(a, numbers.Number) for a in step.arguments)
    return adds or step.target is F.dropout


def _replaced(what: str) -> StepError:
    return StepError(
        f"{what} was replaced after make_private, so the bounds no longer hold. Change tensors in place, "
        "under torch.no_grad() and before a batch is drawn, or make a new private run."
    )


Node = torch.autograd.graph.Node
Shapes = list[list[int]]

_CLIPPED = "ClippedInputBackward"
_EXAMPLES = (2, 3)  # two batch sizes show which sizes depend on the batch
_SETTINGS = (bool, int, float, str)
_FOLLOWS = ("_sym_", "_sizes", "_strides", "_options")  # saved shapes; shapes are compared separately


class Spot(NamedTuple):
    """The description of one graph node."""

    name: str  # of its operation; "parameter" for a node that accumulates a parameter's gradient
    leads: Sequence[tuple[int | None, int]]  # where each gradient that it returns goes: a node, and an input of it
    shapes: Shapes  # of the gradients that it receives
    settings: tuple[tuple[str, Any], ...]  # saved attributes, except tensors; norm and shape of a clip; a name

    @property
    def words(self) -> str:
        """The operation as text, without output sizes, which depend on the batch size."""
        extra = ", ".join(f"{k.removeprefix('_saved_')}={v}" for k, v in self.settings)
        return f"{self.name.removesuffix('Backward0')}{f' ({extra})' if extra else ''}"


class GraphMatch:
    """Compares the graph of outputs with that of a traced network.

    The comparison uses the model's current mode (training or evaluation). It walks over the nodes of the graph, well
    below a millisecond for small networks.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._modules = list(network.graph.modules())
        # For each mode and device, the spots of the trace; a pair (a, b) stands for the size a + b n for n examples.
        self._traced: dict[tuple[Any, ...], list[tuple[Spot, list[list[tuple[int, int]]]]]] = {}
        self._owners = {id(p): name for name, p in network.graph.named_parameters()}

    def require(self, outputs: Tensor) -> None:
        """Refuse outputs that were not computed by the traced operations."""
        if outputs.grad_fn is None:
            raise UnsupportedModelError(
                "outputs: they have no autograd graph. Give what the model returned, with gradients enabled."
            )
        if tuple(outputs.shape[1:]) != self._network.output_shape:
            raise UnsupportedModelError(
                "outputs: the shape of an example differs from the traced one, which is "
                f"{self._network.output_shape}. Give what the model returned."
            )
        if len(outputs) == 0:
            return  # an empty batch has no gradients to bound
        expected = self._of_the_trace(outputs.device, len(outputs))
        try:
            # Graphs of different sizes differ in a spot before one of them ends.
            both = enumerate(zip(expected, self._spots(outputs.grad_fn), strict=True))
            differing = next(((place, one, other) for place, (one, other) in both if one != other), None)
        except RuntimeError as error:
            raise UnsupportedModelError(
                "outputs: their graph was used up, or weights were changed since the model ran: the bounds are for "
                "the current weights. Run the model again."
            ) from error
        if differing is not None:
            place, one, other = differing
            same = ", with other shapes or inputs" if one.words == other.words else ""
            raise UnsupportedModelError(
                f"outputs: operation {place} from the end is {other.words}{same}, where the traced model has "
                f"{one.words}: give what that model returned, without autocast, compilation or other branches."
            )

    def _of_the_trace(self, device: torch.device, examples: int) -> list[Spot]:
        # For a single example torch uses another layout of sequences, with other views.
        key = (*[m.training for m in self._modules], device, examples == 1)
        if key not in self._traced:
            few, more = (self._recorded(device, n) for n in ((1, 1) if examples == 1 else _EXAMPLES))
            pairs = zip(few, more, strict=True)
            self._traced[key] = [(one, _growing(one.shapes, other.shapes)) for one, other in pairs]
        return [
            spot._replace(shapes=[[a + b * examples for a, b in shape] for shape in sizes])
            for spot, sizes in self._traced[key]
        ]

    def _recorded(self, device: torch.device, examples: int) -> list[Spot]:
        takes_numbers = any(isinstance(m, ClipInput) for m in self._modules)
        kind = next(self._network.graph.parameters()).dtype if takes_numbers else torch.long
        inputs = torch.zeros((examples, *self._network.input_shape), dtype=kind, device=device)
        # Bounds hold for the dtype of the weights; autocast would run other operations.
        no_autocast = torch.autocast(device.type, enabled=False)
        with torch.random.fork_rng(enabled=True), torch.enable_grad(), no_autocast:
            outputs = self._network.graph(inputs)
        return list(self._spots(outputs.grad_fn))

    def _spots(self, root: Node) -> Iterator[Spot]:
        """Every node once, in an order that depends on the graph alone."""
        order: dict[Any, int] = {root: 0}
        nodes: list[Any] = [root]
        for node in nodes:  # the list grows during the loop
            name = node.name()
            if name == ACCUMULATE and isinstance(node.variable, nn.Parameter):
                yield Spot("parameter", (), [], (("name", self._owners.get(id(node.variable), "unknown")),))
                continue
            following = node.next_functions
            if name == _CLIPPED:
                # Before a clip only paths to a parameter matter. The second input is the anchor.
                following = following[:1] if _leads_to_parameter(following[0][0]) else ()
            leads: list[tuple[int | None, int]] = []
            for child, index in following:
                if child is not None and child not in order:
                    order[child] = len(nodes)
                    nodes.append(child)
                leads.append((order.get(child), index))
            if name == _CLIPPED:
                yield Spot(name, leads, [], (("max_norm", node.max_norm), ("shape", node.example_shape)))
            else:
                yield Spot(name, leads, [m.shape for m in node._input_metadata], _settings(node))


def _growing(few: Shapes, more: Shapes) -> list[list[tuple[int, int]]]:
    """Pairs (a, b) with size a + b n, from the sizes for two numbers of examples."""
    n, step = _EXAMPLES[0], _EXAMPLES[1] - _EXAMPLES[0]
    found = []
    for one, other in zip(few, more, strict=True):
        slopes = [(b - a) // step for a, b in zip(one, other, strict=True)]
        found.append([(a - slope * n, slope) for a, slope in zip(one, slopes, strict=True)])
    return found


_SAVED: dict[type, tuple[str, ...]] = {}  # cached, because listing attributes is slow


def _settings(node: Any) -> tuple[tuple[str, Any], ...]:
    """Saved numbers and strings of an operation, such as stride or slope, without sizes."""
    kind = type(node)
    if kind not in _SAVED:
        names = (name for name in dir(node) if name.startswith("_saved_"))
        _SAVED[kind] = tuple(name for name in names if not any(word in name for word in _FOLLOWS))
    found: list[tuple[str, Any]] = []
    for name in _SAVED[kind]:
        value = getattr(node, name)
        if isinstance(value, _SETTINGS):
            found.append((name, value))
        elif isinstance(value, Tensor):
            # A tensor without dimensions may be a constant of the code, such as the 2 of `2 * x`.
            is_number = value.ndim == 0 and value.device.type == "cpu" and not value.requires_grad
            if is_number and not isinstance(value, nn.Parameter):
                found.append((name, value.item()))
        elif isinstance(value, (tuple, list)) and all(isinstance(v, (bool, int, float)) for v in value):
            found.append((name, tuple(value)))
    return tuple(found)


def _leads_to_parameter(node: Node | None) -> bool:
    nodes = () if node is None else graph_nodes(node)
    return any(isinstance(getattr(n, "variable", None), nn.Parameter) for n in nodes)
