"""Checks that a model still computes what was traced.

The bounds depend on the constants, layers and tensors of the trace. The autograd graph does not show all of them, for
example the 3 of x + 3, or a replaced frozen tensor. So everything that a forward pass may read from the modules is
recorded and compared in every step. On a difference the model is traced again: the bounds stay valid if the operations,
layers and tensors are the same, and otherwise the model is refused.

A constant may also come from a global variable, a closure or a tensor in a list. So a model with constants that
autograd does not show, or with unused layers that it could switch to, is traced in every step.
"""

from __future__ import annotations

import dataclasses
import numbers
import operator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from clipwise.errors import StepError
from clipwise.layers.clipped.layer import HOOKS
from clipwise.lipschitz.forward_graph import Step, attribute_of, graph_again, steps_of
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
                    "make_private, so the bounds no longer hold: make a new private run. (Change weights in place, "
                    "under torch.no_grad().)"
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
            "The model's forward pass differs from its trace: "
            f"{other.words}, where it had {one.words}. The bounds hold for the trace only: restore what it reads, or "
            "make a new private run."
        )


def _hides_a_number(step: Step) -> bool:
    """The 3 of x + 3, and the rate of a dropout: autograd graphs do not show them."""
    adds = step.target in _ADDS and any(isinstance(a, numbers.Number) for a in step.arguments)
    return adds or step.target is F.dropout


def _replaced(what: str) -> StepError:
    return StepError(
        f"{what} was replaced after make_private, so the bounds no longer hold. Change tensors in place, "
        "under torch.no_grad() and before a batch is drawn, or make a new private run."
    )
