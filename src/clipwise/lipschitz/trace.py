"""A model as a graph of operations with bounds."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from clipwise.errors import ConfigurationError, UnsupportedModelError
from clipwise.gradients.precision import IEEE, Arithmetic
from clipwise.layers.bounded import ClipInput
from clipwise.lipschitz.forward_graph import GraphStep, attribute_of, graph_of, steps_of
from clipwise.lipschitz.linear import ParameterRule
from clipwise.lipschitz.rule import Call, Rounding, Rule, refusal
from clipwise.lipschitz.rule_tables import INSTEAD, function_rule, module_rule, require_rule
from clipwise.validation.arguments import plain, require_module

# The traced batch size: a prime that is unlikely as another size. Meta tensors hold no data.
_EXAMPLES = 7919
# A second batch size: numbers that differ between the two depend on it. Remainders by small numbers differ too.
_MORE_EXAMPLES = 8212
_TAKE_SIZES = ("view", "reshape")


@dataclass(frozen=True)
class Operation:
    """One operation of the network."""

    name: str
    where: str  # its name in messages
    rule: Rule
    inputs: tuple[str, ...]
    parameters: Mapping[str, str]  # from its module's names to the model's


@dataclass(frozen=True)
class Network:
    """A traced model.

    Args:
        graph: a module that computes the traced graph. It shares all parameters with the model.
        operations: in execution order.
        input: the name of the model's input.
        output: the name of its output.
        input_shape, output_shape: of one example.
        rounding: the arithmetic that the bounds allow for.
        steps: all traced operations, including unused ones.
    """

    graph: fx.GraphModule
    operations: tuple[Operation, ...]
    input: str
    output: str
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    rounding: Rounding
    steps: tuple[GraphStep, ...]

    @cached_property
    def uses(self) -> Mapping[str, int]:
        """The number of operations that use each parameter."""
        return Counter(full for op in self.operations for full in op.parameters.values())

    @cached_property
    def parameters(self) -> Mapping[str, Tensor]:
        """The parameters under all of their names."""
        return dict(self.graph.named_parameters(remove_duplicate=False))


def trace(model: nn.Module, input_shape: Sequence[int], arithmetic: Arithmetic = IEEE) -> Network:
    """Trace a model for one example. Refuses operations that have no bound or mix examples.

    Args:
        model: its first operation on the input is a `ClipInput`, or an embedding of ids.
        input_shape: of one example, without the batch. It is public and the same for all examples.
        arithmetic: of the products in training.
    """
    require_module(model)
    given = plain(input_shape)
    if not (isinstance(given, (list, tuple)) and all(isinstance(n, int) and n > 0 for n in given)):
        raise ConfigurationError(
            f"input_shape must be the sizes of one example without the batch, such as (1, 28, 28), not {given!r}."
        )
    module = fx.GraphModule(model, graph_of(model))
    return _Walk(model, module, tuple(given), Rounding(unit_of(model), arithmetic)).network()


class _Walk:
    """Runs the graph on meta tensors and builds the rule of every operation."""

    def __init__(
        self, model: nn.Module, module: fx.GraphModule, input_shape: tuple[int, ...], rounding: Rounding
    ) -> None:
        self._model, self._module, self._rounding = model, module, rounding
        self._input_shape = input_shape
        self._hollow = copy.deepcopy(module).to("meta")
        self._values: dict[fx.Node, Any] = {}
        self._with_more: dict[fx.Node, Any] = {}
        self._operations: list[Operation] = []
        # Tied parameters have several names; bounds use the first, as model.named_parameters() does.
        self._names = {id(p): name for name, p in model.named_parameters()}

    def network(self) -> Network:
        nodes = list(self._module.graph.nodes)
        inputs = [n for n in nodes if n.op == "placeholder" and n.users]
        if len(inputs) != 1:
            raise UnsupportedModelError(
                f"Lipschitz bounds: the model uses {len(inputs)} inputs; it must have exactly one."
            )
        (input_node,) = inputs
        self._require_clipped(input_node)
        for node in nodes:
            if node.op != "output" and (node.op != "placeholder" or node.users):
                self._follow(node)
        (result,) = nodes[-1].args
        if not (isinstance(result, fx.Node) and isinstance(self._values[result], Tensor)):
            raise UnsupportedModelError("Lipschitz bounds: the model must return one tensor.")
        graph = self._module.graph
        steps = tuple(steps_of(graph))
        graph.eliminate_dead_code()  # only now: an unused operation may have written in place into a used value
        self._module.recompile()
        used = {node.name for node in graph.nodes}
        operations = tuple(op for op in self._operations if op.name in used)
        shapes = self._input_shape, self._shape(result)
        return Network(self._module, operations, input_node.name, result.name, *shapes, self._rounding, steps)

    def _require_clipped(self, input_node: fx.Node) -> None:
        """Every operation on the input must bound it."""
        for user in input_node.users:
            if not isinstance(self._layer(user), (ClipInput, nn.Embedding)) and not _reads_shape(user):
                raise UnsupportedModelError(
                    f"Lipschitz bounds: {_where(user)!r} gets inputs of unbounded norm. Begin the model with "
                    "clipwise.layers.ClipInput(input_norm), for example nn.Sequential(ClipInput(1.0), model)."
                )

    def _follow(self, node: fx.Node) -> None:
        """Evaluate the node for two batch sizes, and build its rule if it is a value of the network."""
        self._with_more[node] = self._evaluated(node, self._with_more, _MORE_EXAMPLES)
        tensors = [n for n in _operands(node) if isinstance(self._values[n], Tensor)]
        versions = [self._values[n]._version for n in tensors]
        self._values[node] = self._evaluated(node, self._values, _EXAMPLES)
        if node.op not in ("placeholder", "get_attr"):
            self._note(node, tensors)
        elif node.op == "get_attr" and isinstance(self._values[node], Tensor):
            owner = attribute_of(self._module, str(node.target))
            name = self._names.get(id(owner))
            rule = ParameterRule(owner, self._shape(node))
            self._operations.append(Operation(node.name, str(node.target), rule, (), {"": name} if name else {}))
        for source, version in zip(tensors, versions, strict=True):
            if self._values[source]._version != version:
                self._require_alone(node, source)

    def _evaluated(self, node: fx.Node, values: dict[fx.Node, Any], examples: int) -> Any:
        if node.op == "placeholder":
            kind = next((p.dtype for p in self._model.parameters() if p.is_floating_point()), torch.float32)
            if any(isinstance(self._layer(user), nn.Embedding) for user in node.users):
                kind = torch.long  # ids
            return torch.empty((examples, *self._input_shape), dtype=kind, device="meta")
        if node.op == "get_attr":
            owner = attribute_of(self._module, str(node.target))
            return owner.detach().to("meta") if isinstance(owner, Tensor) else owner
        try:
            return self._run(node, *_given(node, values))
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"Lipschitz bounds: {_where(node)!r} does not accept examples of shape {self._input_shape}, which is "
                f"input_shape or that of the dataset ({type(error).__name__}: {error})."
            ) from error

    def _run(self, node: fx.Node, arguments: Any, options: Any) -> Any:
        if node.op == "call_module":
            module = self._hollow.get_submodule(str(node.target))
            require_rule(_where(node), module)
            return module(*arguments, **options)
        if node.op == "call_method":
            if str(node.target).startswith("register_"):
                raise refusal(node.name, node.target, "a hook has no bound: leave it out")
            return getattr(arguments[0], str(node.target))(*arguments[1:], **options)
        assert callable(node.target)
        return node.target(*arguments, **options)

    def _note(self, node: fx.Node, tensors: list[fx.Node]) -> None:
        """Add the operation of a node that returns a value of the network."""
        value, where, target = self._values[node], _where(node), node.target
        arguments, options = _given(node, self._values)
        if not isinstance(value, Tensor):
            if tensors and not _is_public(value):
                raise refusal(where, target, INSTEAD.get(target, "it does not return a single tensor"))
            return
        self._require_examples(where, target, value)
        call = Call(where, target, [self._shape(n) for n in tensors], tuple(value.shape[1:]), self._rounding)
        parameters: dict[str, str] = {}
        module = self._layer(node)
        if module is not None:
            rule = module_rule(replace(call, target=module))
            parameters = {name: self._names[id(p)] for name, p in module.named_parameters()}
        else:
            given = tuple(None if isinstance(a, Tensor) else a for a in arguments)
            has_weights = any(n.op == "get_attr" for n in tensors)
            rule = function_rule(replace(call, arguments=given, options=options, has_weights=has_weights))
        self._require_no_count(node, where)
        self._operations.append(Operation(node.name, where, rule, tuple(n.name for n in tensors), parameters))

    def _require_examples(self, where: str, target: Any, value: Tensor) -> None:
        if value.ndim == 0 or value.shape[0] != _EXAMPLES:
            reason = "the first dimension of its result does not hold the examples: process each example independently"
        elif value.dtype not in (torch.float32, torch.float64):
            reason = f"it returns {value.dtype}: the rounding of half precision is too large, leave dtype out"
        elif any(n and n % _EXAMPLES == 0 for n in value.shape[1:]):
            reason = (
                "its result has the examples along a second dimension too: give operands the same number of dimensions"
            )
        else:
            return
        raise refusal(where, target, reason)

    def _require_no_count(self, node: fx.Node, where: str) -> None:
        """Refuse to compute with the number of examples, which is secret; it may only be a size."""
        may_size = getattr(node.target, "__name__", node.target) in _TAKE_SIZES
        for n in _operands(node):
            here, more = self._values[n], self._with_more[n]
            if _is_public(here) and here != more and not (may_size and _are_sizes(here, more)):
                reason = "it computes with the number of examples, which is secret"
                instead = "use a number that is the same for every batch. It may be a size for view or reshape"
                raise refusal(where, node.target, f"{reason}: {instead}")

    def _require_alone(self, node: fx.Node, changed: Any) -> None:
        """Refuse in-place changes of values with other uses, or of the clipped input."""
        while isinstance(changed, fx.Node):
            reason = "a value with other uses" if len(changed.users) > 1 else "the output of ClipInput"
            if len(changed.users) > 1 or isinstance(self._layer(changed), ClipInput):
                raise refusal(node.name, node.target, f"it changes in place {reason}: leave inplace out")
            # A view shares memory with its base.
            rules = [op.rule for op in self._operations if op.name == changed.name]
            changed = changed.args[0] if any(getattr(rule, "is_view", False) for rule in rules) else None

    def _layer(self, node: fx.Node) -> nn.Module | None:
        return self._module.get_submodule(str(node.target)) if node.op == "call_module" else None

    def _shape(self, node: fx.Node) -> tuple[int, ...]:
        """The shape of one example's value; parameters have no batch dimension."""
        shape = tuple(self._values[node].shape)
        return shape if node.op == "get_attr" and shape[:1] != (1,) else shape[1:]


def _where(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else node.name


def _given(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    given: Any = (node.args, node.kwargs)
    return fx.node.map_arg(given, lambda n: values[n])


def _operands(node: fx.Node) -> list[fx.Node]:
    """Its input nodes, with repetitions: x + x has two."""
    found: list[fx.Node] = []
    given: Any = (node.args, node.kwargs)
    fx.node.map_arg(given, found.append)
    return found


def _is_public(value: Any) -> bool:
    """Sizes and dtypes, which are the same for all examples."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_public, value))
    return isinstance(value, (int, float, bool, str, torch.dtype, torch.device, type(None)))


def _reads_shape(node: fx.Node) -> bool:
    """Whether it only reads the shape of its operand; uses of the result are checked separately."""
    if node.op == "call_method":
        return node.target in ("size", "dim")
    return node.target is getattr and node.args[1] in ("shape", "ndim")


def _are_sizes(here: Any, more: Any) -> bool:
    """Whether the difference is the batch size itself, not a number computed from it."""
    if isinstance(here, (tuple, list)):
        return len(here) == len(more) and all(map(_are_sizes, here, more))
    return here == more or (here, more) == (_EXAMPLES, _MORE_EXAMPLES)


def unit_of(model: nn.Module) -> float:
    """The machine epsilon of the least precise dtype among the parameters."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if not kinds <= {torch.float32, torch.float64}:
        raise UnsupportedModelError(
            "Lipschitz bounds: the parameters must be float32 or float64; the rounding of half precision is too large."
        )
    return max((torch.finfo(kind).eps for kind in kinds), default=torch.finfo(torch.float32).eps)
