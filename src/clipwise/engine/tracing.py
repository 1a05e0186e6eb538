"""Traces a function of tensors into one flat graph of aten operations.

The trace runs on tensors without memory (fake tensors), so no value of a batch can become a constant of the graph.
Every tensor that existed before, such as a parameter, a buffer or a tensor that a loss refers to, is an input of the
graph, so later changes of its values take effect. What cannot be traced raises `TraceError` with the reason:

- code that reads a value (`.item()`, a branch on a tensor, `nonzero`), because its result would stay what it was;
- a forward pass that changes such a tensor in place;
- a product in another arithmetic than that around the step, if the graph cannot pin it (pinned.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from clipwise.engine import pinned
from clipwise.kernels.tracing import tracing

_COARSE = (torch.bfloat16, torch.float16)


class TraceError(RuntimeError):
    """A function that cannot be traced."""


@dataclass(frozen=True)
class Traced:
    """A flat graph, called with the inputs and then `lifted`, under `torch.no_grad`.

    Attributes:
        graph: returns a list of tensors.
        lifted: the tensors that existed before the trace.
        is_random: whether it draws random numbers.
        is_coarse: whether it computes in bfloat16 or float16.
    """

    graph: GraphModule
    lifted: list[Tensor]
    is_random: bool
    is_coarse: bool


def trace(act: Callable[..., list[Tensor]], inputs: Sequence[Tensor], model: nn.Module) -> Traced:
    """The graph of `act(*inputs)`, for inputs of these shapes. Nothing is computed."""
    torch.clear_autocast_cache()  # it may hold cast parameters
    try:
        with (
            _attributes_kept(model),
            torch.autograd.set_multithreading_enabled(False),
            torch.compiler.set_stance("force_eager"),
            tracing(),
            _Watch(),
        ):
            made = make_fx(act, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    except TraceError:
        raise
    except Exception as error:  # any error: eager steps of the same code have succeeded
        raise TraceError(_reason(error)) from error
    finally:
        torch.clear_autocast_cache()
    return _lifted(made)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises for operations whose results would be constants, and pins products to their arithmetic."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._around = pinned.settings()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            raise TraceError(
                "the forward pass, the loss or a search for the layout of the examples reads a value of a tensor "
                f"({func.overloadpacket.__name__})"
            )
        own = pinned.operation(func, args, self._around)
        return func(*args, **(kwargs or {})) if own is None else own(*args)


def _reason(error: Exception) -> str:
    name = type(error).__name__
    if "DynamicOutputShape" in name or "DataDependent" in name:
        return "the shape of a result depends on the data"
    return str(error).strip().partition("\n")[0] or name


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Restores what the forward pass sets on modules, such as a cached mask: it would be a tensor without memory."""
    before = [(m, [(d, dict(d)) for d in (m.__dict__, m._parameters, m._buffers)]) for m in model.modules()]
    try:
        yield
    finally:
        for _, held in before:
            for now, earlier in held:
                if now.keys() != earlier.keys() or any(now[key] is not value for key, value in earlier.items()):
                    now.clear()
                    now.update(earlier)


def _lifted(made: GraphModule) -> Traced:
    """Turn the tensors that the graph holds into inputs."""
    graph = made.graph
    places: dict[int, Node] = {}
    lifted: list[Tensor] = []
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        held = getattr(made, str(node.target))
        if not isinstance(held, Tensor) or torch._is_functional_tensor(held) or hasattr(held, "fake_mode"):
            raise TraceError(f"the graph holds a {type(held).__name__}")
        if id(held) not in places:
            with graph.inserting_after(last):
                places[id(held)] = last = graph.placeholder(f"lifted_{len(lifted)}")
            lifted.append(held)
        node.replace_all_uses_with(places[id(held)])
        graph.erase_node(node)
    graph.eliminate_dead_code(_is_impure)
    _require_unchanged(graph)
    called = [node for node in graph.nodes if node.op == "call_function"]
    is_random = any(map(_is_random, called))
    is_coarse = any(getattr(node.meta.get("val"), "dtype", None) in _COARSE for node in called)
    return Traced(GraphModule(nn.Module(), graph), lifted, is_random, is_coarse)


def _is_random(node: Node) -> bool:
    """Whether an operation draws random numbers. Attention without dropout does not."""
    given = _given(node)
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and given.get("dropout_p") != 0


def _given(node: Node) -> dict[str, Any]:
    """The arguments of an operation by name, with those that have their default value."""
    schema = getattr(node.target, "_schema", None)
    arguments = () if schema is None else schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments}
    return defaults | dict(zip(defaults, node.args, strict=False)) | node.kwargs


def _is_impure(node: Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is None or schema.is_mutable


def _require_unchanged(graph: torch.fx.Graph) -> None:
    """Raise if the graph writes to an input, or to a view of one."""
    shared: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            shared.add(node)
        schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
        if schema is None:
            continue
        given = _given(node)
        for argument in schema.arguments:
            value, alias = given.get(argument.name), argument.alias_info
            if not isinstance(value, Node) or value not in shared or alias is None:
                continue
            if alias.is_write:
                raise TraceError(f"the forward pass changes a tensor in place ({schema.name})")
            shared.add(node)
