"""A model's forward pass as a torch.fx graph that contains no constants except the model's own."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from clipwise.errors import UnsupportedModelError
from clipwise.lipschitz.rule import refusal
from clipwise.lipschitz.rule_tables import TRACED_AS_A_WHOLE, require_no_global_hooks, require_no_hooks

_MADE_BY_FX = "_tensor_constant"


class GraphStep(NamedTuple):
    """One operation of a graph, in a form that can be compared between graphs."""

    op: str
    target: Any
    arguments: Any
    options: Any

    @property
    def words(self) -> str:
        """The operation as text, for messages."""
        name = self.target if isinstance(self.target, str) else getattr(self.target, "__name__", self.target)
        given = [*map(str, self.arguments), *(f"{k}={v}" for k, v in self.options.items())]
        return f"{name}({', '.join(given)})"


def graph_of(model: nn.Module) -> fx.Graph:
    """Trace the forward pass twice. Refuses a pass that differs, for example because it draws random numbers."""
    with _left_as_it_was(model):
        graph, again = (_traced_once(model) for _ in range(2))
    for one, other in zip(steps_of(graph), steps_of(again), strict=False):
        if one != other:
            differ = f"its forward pass is not the same each time ({one.words}, then {other.words})"
            raise refusal("", model, f"{differ}: random numbers and counters in it have no bound")
    return graph


def graph_again(model: nn.Module) -> fx.Graph:
    """Trace the forward pass once, for comparison with an earlier graph."""
    with _left_as_it_was(model):
        return _traced_once(model)


def _traced_once(model: nn.Module) -> fx.Graph:
    require_no_global_hooks()
    for name, module in model.named_modules():
        require_no_hooks(name, module)
    try:
        graph = _Tracer().trace(model)
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise refusal("", model, _untraceable(error)) from error
    for node in reversed(graph.nodes):  # unused items, as in `output, _ = rnn(x)`
        if node.target is operator.getitem and not node.users:
            graph.erase_node(node)
    return graph


def steps_of(graph: fx.Graph) -> list[GraphStep]:
    """All operations of a graph in their order."""

    def named(given: Any) -> Any:
        return fx.node.map_arg(given, lambda n: n.name)

    return [GraphStep(node.op, node.target, named(node.args), named(node.kwargs)) for node in graph.nodes]


def attribute_of(module: nn.Module, path: str) -> Any:
    """The attribute at a path such as "block.scale"; None if it does not exist."""
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


class _Tracer(fx.Tracer):
    """A tracer that does not enter modules with their own rule."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, TRACED_AS_A_WHOLE) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Errors name the innermost module that cannot be traced."""
        try:
            return super().call_module(m, forward, args, kwargs)
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise refusal(self.path_of_module(m), m, _untraceable(error)) from error

    def create_arg(self, a: Any) -> Any:
        """Refuse tensors that the pass creates: they could differ in the next pass."""
        found = super().create_arg(a)
        if isinstance(a, Tensor) and isinstance(found, fx.Node) and str(found.target).startswith(_MADE_BY_FX):
            instead = "use a plain number, or a buffer of the module (register_buffer)"
            reason = f"its forward pass makes a tensor that does not come from the input: {instead}"
            raise refusal("", self.root, reason)
        return found


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Restore all module attributes afterwards: a forward pass or torch.fx may set some."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


def _untraceable(error: Exception) -> str:
    return (
        "it cannot be traced, because its forward depends on values or uses Python that torch.fx does not support "
        f"({type(error).__name__}: {str(error).rstrip('.')}). Write it without such branches"
    )
