"""The tensors of a batch, marked, so that the losses' graph shows what was computed from which input.

A marked tensor is tracked by autograd but behaves as the ordinary tensor that the data set gave: `requires_grad` is
False, `numpy()` works, `requires_grad = True` may be set. The mark spreads to everything that is computed from the
batch alone. What a parameter takes part in requires a gradient anyway, and is a plain tensor again, so a mark costs
some microseconds in the first layer and nothing behind it.

Integers carry no gradient. Their mark shows two things that no gradient shows: a number that was computed from the
whole batch (`pooled`), and a comparison of each example with each other one (`Trace.pairs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.graph import GradientEdge, get_gradient_edge

from clipwise.sampling.batch_structure import map_tensors, tensors_in


@dataclass(eq=False)
class Trace:
    """What is known of the tensors of one batch.

    Attributes:
        inputs: where the batch's floating-point tensors enter the graph.
        others: the tensors that carry no gradient, such as ids.
        pairs: nodes of operations that made one entry for each pair of examples.
    """

    inputs: list[GradientEdge] = field(default_factory=list)
    others: list[Tensor] = field(default_factory=list)
    pairs: list[Any] = field(default_factory=list)

    def mark(self, batch: Any) -> Any:
        """The same batch with every tensor marked. It shares memory with the original."""
        return map_tensors(self._marked, batch)

    def _marked(self, value: Tensor) -> Tensor:
        if value.dim() == 0:
            return value  # a number of the whole batch, and no example's
        if type(value) is not Tensor or value.requires_grad:
            self.others.append(value)  # a type of the user's own, with rules of its own
            return value
        if not (value.is_floating_point() or value.is_complex()):
            self.others.append(value)
            return _as_marked(value.detach(), self, is_pooled=False)
        # The anchor requires a gradient, so that there is a node. In place of a leaf, which could not be changed in
        # place, and without a copy.
        entered: Tensor = _Enter.apply(torch.zeros((), requires_grad=True), (value,))  # type: ignore[no-untyped-call]
        self.inputs.append(get_gradient_edge(entered))  # which keeps the node, also if the tensor is not used
        return _as_marked(entered, self, is_pooled=False)


class MarkedTensor(Tensor):
    """A tensor that was computed from a batch and from no parameter.

    Attributes:
        origin: the trace of its batch.
        is_pooled: whether a single number of several rows of the batch is in it.
    """

    origin: Trace
    is_pooled: bool

    @classmethod
    @_disable_dynamo  # compiled regions take no tensors of classes of their own: they begin behind the marks
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """The function's result, marked if it was computed from the batch alone."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _FACTS:
                return _FACTS[func]
            if func in _TRACKING:
                return _track(func, *args, **kwargs)
            if func in _NEW:
                return func(*args, **kwargs)
            if func in _READS or kwargs.get("out") is not None or _overwrites_another(func, args):
                args, kwargs = map_tensors(plain, args), map_tensors(plain, kwargs)
                return func(*args, **kwargs)
            return _spread(func, args, kwargs)


def plain(value: Tensor) -> Tensor:
    """The values of a tensor as the data set gave them, without mark and history; other tensors as they are."""
    if not isinstance(value, MarkedTensor):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.detach()


def tracked(value: Tensor) -> Tensor:
    """The same tensor, which autograd tracks for its user as well."""
    if isinstance(value, MarkedTensor):
        with torch._C.DisableTorchFunctionSubclass():
            if value.requires_grad:
                value.__class__ = Tensor  # type: ignore[assignment]
    return value


class _Enter(torch.autograd.Function):
    """The identity, at whose node a batch's tensor enters the graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, held: tuple[Tensor]) -> Tensor:
        return held[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


def _as_marked(value: Tensor, trace: Trace, is_pooled: bool) -> MarkedTensor:
    value.__class__ = MarkedTensor  # no copy, and no further node
    assert isinstance(value, MarkedTensor)
    value.origin, value.is_pooled = trace, is_pooled
    return value


def _spread(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The result of a function; whatever has no parameter in it is marked."""
    given = list(tensors_in((args, kwargs)))
    marked = [t for t in given if isinstance(t, MarkedTensor)]
    has_parameters = any(t.requires_grad for t in given if not isinstance(t, MarkedTensor))
    result = func(*args, **kwargs)
    if not marked:
        return result
    is_pooled = any(t.is_pooled for t in marked)
    changed = args[0] if func is Tensor.__setitem__ else result
    for found in tensors_in(changed):
        if found.requires_grad and has_parameters:
            tracked(found)  # as in outputs[rows] = expert(inputs[rows])
            if _is_of_pairs(found, given):
                marked[0].origin.pairs.append(found.grad_fn)
        elif type(found) is Tensor and (torch.is_grad_enabled() or not found.is_floating_point()):
            # (Without gradients, as in the forward pass of a torch.autograd.Function, parameters are not known.)
            is_one = found.numel() == 1 and any(t.numel() > 1 for t in marked)
            _as_marked(found, marked[0].origin, is_pooled or is_one)
    return result


def _is_of_pairs(result: Tensor, given: list[Tensor]) -> bool:
    """Whether n rows were compared with n rows: [n, 1] and [n] (or [1, n]) make [n, n]. Not rows of a weight."""
    if result.dim() != 2 or result.shape[0] != result.shape[1] or len(result) < 2:
        return False
    n = len(result)
    shapes = [t.shape for t in given if isinstance(t, MarkedTensor) or not t.is_leaf]
    return (n, 1) in shapes and ((n,) in shapes or (1, n) in shapes)


def _overwrites_another(func: Callable[..., Any], args: Any) -> bool:
    """Whether a batch is copied into memory of the user's own, which lasts: it must not hold this batch's graph."""
    return func is Tensor.copy_ and not isinstance(args[0], MarkedTensor) and not args[0].requires_grad


def _track(func: Callable[..., Any], value: Tensor, is_wanted: bool = True) -> Tensor | None:
    """`requires_grad = True` and `requires_grad_()`: from here on autograd tracks the tensor for its user as well."""
    if is_wanted:
        is_new = not value.requires_grad
        value.__class__ = Tensor
        if is_new:
            func(value, is_wanted)
    return value if func is Tensor.requires_grad_ else None


_tensor: Any = Tensor  # whose properties have types of their own for mypy
# What an ordinary tensor of a batch says of itself.
_FACTS: dict[Any, Any] = {
    _tensor.requires_grad.__get__: False,
    _tensor.is_leaf.__get__: True,
    _tensor.grad_fn.__get__: None,
}
_TRACKING: set[Any] = {Tensor.requires_grad_, _tensor.requires_grad.__set__}
# What takes a size, a type or a device of the batch, and no value.
_NEW: set[Any] = {
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty, Tensor.new_tensor),
    *(torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like),
    *(torch.rand_like, torch.randn_like, torch.randint_like),
}
# What takes values out of the graph.
_READS: set[Any] = {
    *(Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.tolist, Tensor.item),
    *(Tensor.__deepcopy__, Tensor.__reduce_ex__, Tensor.__repr__, Tensor.__format__),
    *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__),
}
