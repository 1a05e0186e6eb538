"""Marked batch tensors, which make the inputs visible in the losses' graph.

Autograd tracks a marked tensor, but it behaves like the data set's own tensor: `requires_grad` is False, `numpy()`
works, `requires_grad = True` may be set. Everything computed from the batch alone is marked too. A result that involves
a parameter is a plain tensor again, so marks cost microseconds in the first layer and nothing later.

Integers carry no gradient. Their marks show things that no gradient shows: a number computed from the whole batch
(`is_pooled`), weights of classes computed from it (`Trace.shared`), and a comparison of each example with every other
one (`Trace.pairs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

from clipwise.sampling.batch_structure import map_tensors, tensors_in


@dataclass(eq=False)
class Trace:
    """The tensors of one batch in the graph.

    Attributes:
        inputs: edges at which the batch's floating-point tensors enter the graph.
        others: tensors that carry no gradient, such as ids.
        pairs: nodes of operations that compute one entry for each pair of examples.
        shared: nodes of losses with weights that are computed from the batch and the same for all examples.
        is_recorded: whether autograd records what is computed from the batch. If not, `inputs` stays empty.
        has_frozen: whether the batch went through a frozen parameter.
    """

    is_recorded: bool = True
    has_frozen: bool = False
    inputs: list[GradientEdge] = field(default_factory=list)
    others: list[Tensor] = field(default_factory=list)
    pairs: list[Any] = field(default_factory=list)
    shared: list[Any] = field(default_factory=list)

    def mark(self, batch: Any) -> Any:
        """Return the batch with every tensor marked. It shares memory with the original."""
        return map_tensors(self._marked, batch)

    def _marked(self, value: Tensor) -> Tensor:
        if value.dim() == 0:
            return value  # one number for the whole batch
        if type(value) is not Tensor or value.requires_grad:
            self.others.append(value)  # a user-defined tensor class, or already tracked
            return value
        carries_gradient = value.is_floating_point() or value.is_complex()
        if not carries_gradient:
            self.others.append(value)
        if not carries_gradient or not self.is_recorded:
            return _as_marked(value.detach(), self, is_pooled=False)
        # The anchor requires a gradient, so the result has a node. A leaf would not allow in-place changes.
        entered: Tensor = _Enter.apply(torch.zeros((), requires_grad=True), (value,))  # type: ignore[no-untyped-call]
        self.inputs.append(get_gradient_edge(entered))  # keeps the node alive
        return _as_marked(entered, self, is_pooled=False)


class MarkedTensor(Tensor):
    """A tensor computed from a batch and from no parameter.

    Attributes:
        origin: the trace of its batch.
        is_pooled: whether it depends on a single number computed from several rows of the batch.
    """

    origin: Trace
    is_pooled: bool

    @classmethod
    @_disable_dynamo  # compiled regions accept no tensor subclasses
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Return the function's result, marked if it was computed from the batch alone."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _FACTS:
                return _FACTS[func]
            if func in _TRACKING:
                return _track(func, *args, **kwargs)
            if func in _NEW:
                return func(*args, **kwargs)
            # A batch that is copied into a tensor of the user must not keep its graph alive.
            is_copy = func is Tensor.copy_ and not isinstance(args[0], MarkedTensor) and not args[0].requires_grad
            if func in _READS or kwargs.get("out") is not None or is_copy:
                return func(*map_tensors(plain, args), **map_tensors(plain, kwargs))
            return _spread(func, args, kwargs)


def plain(value: Any) -> Any:
    """Return a marked tensor's values without mark and history; return anything else unchanged."""
    if not isinstance(value, MarkedTensor):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.detach()


def tracked(value: Tensor) -> Tensor:
    """Remove the mark if autograd tracks the tensor, so that the user sees `requires_grad=True`."""
    if isinstance(value, MarkedTensor):
        with torch._C.DisableTorchFunctionSubclass():
            if value.requires_grad:
                value.__class__ = Tensor  # type: ignore[assignment]
    return value


class _Enter(torch.autograd.Function):
    """The identity. Its node is where a batch's tensor enters the graph."""

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
    """Call a function and mark results that involve no parameter."""
    given = _flat([*args, *kwargs.values()])
    marked = [t for t in given if isinstance(t, MarkedTensor)]
    is_shared = False
    if marked and func in _BY_CLASS | _BROADCAST:
        args, kwargs, is_shared = _with_constant_weights(func, args, kwargs)
    has_parameters = any(t.requires_grad for t in given if not isinstance(t, MarkedTensor))
    result = func(*args, **kwargs)
    if not marked:
        return result
    trace = marked[0].origin
    trace.has_frozen |= any(isinstance(t, nn.Parameter) and not t.requires_grad for t in given)
    if is_shared:
        trace.shared.append(result.grad_fn)
    is_pooled = any(t.is_pooled for t in marked)
    changed = args[0] if func is Tensor.__setitem__ else result
    for found in _flat([changed]):
        if found.requires_grad and has_parameters:
            tracked(found)  # as in outputs[rows] = expert(inputs[rows])
            if _is_of_pairs(found, given):
                trace.pairs.append(found.grad_fn)
        elif type(found) is Tensor and (torch.is_grad_enabled() or not found.is_floating_point()):
            # Without gradients, as in the forward pass of a torch.autograd.Function, parameters cannot be detected.
            is_one = found.numel() == 1 and any(t.numel() > 1 for t in marked)
            _as_marked(found, trace, is_pooled or is_one)
    return result


def _with_constant_weights(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any, bool]:
    """The arguments of a loss with weights that autograd does not track: torch has no gradients for them.

    The last result is whether a weight is computed from the batch and the same for all examples.
    """
    target = kwargs["target"] if "target" in kwargs else args[1]
    weights = [*args[2:], *(value for name, value in kwargs.items() if name not in ("input", "target"))]
    of_batch = [w for w in weights if isinstance(w, MarkedTensor)]
    own = {name: kwargs[name] for name in ("input", "target") if name in kwargs}
    args, kwargs = (*args[:2], *map(plain, args[2:])), {name: plain(value) for name, value in kwargs.items()}
    return args, kwargs | own, any(func in _BY_CLASS or _is_broadcast(w, target) for w in of_batch)


def _is_broadcast(weight: Tensor, target: Tensor) -> bool:
    """Whether a weight is the same for all rows of the target."""
    return weight.dim() < target.dim() or len(weight) < len(target) or weight.stride(0) == 0


def _flat(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among arguments or results, of which few are containers."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found


def _is_of_pairs(result: Tensor, given: list[Tensor]) -> bool:
    """Whether n rows were compared with n rows: [n, 1] and [n] (or [1, n]) give [n, n]. Weights do not count."""
    if result.dim() != 2 or result.shape[0] != result.shape[1] or len(result) < 2:
        return False
    n = len(result)
    shapes = [t.shape for t in given if isinstance(t, MarkedTensor) or not t.is_leaf]
    return (n, 1) in shapes and ((n,) in shapes or (1, n) in shapes)


def _track(func: Callable[..., Any], value: Tensor, is_wanted: bool = True) -> Tensor | None:
    """Implement `requires_grad = True` and `requires_grad_()`: remove the mark."""
    if is_wanted:
        is_new = not value.requires_grad
        value.__class__ = Tensor
        if is_new:
            func(value, is_wanted)
    return value if func is Tensor.requires_grad_ else None


# Losses with a weight for each class, and with weights that are broadcast to the target.
_BY_CLASS: set[Any] = {F.cross_entropy, F.nll_loss, F.multi_margin_loss}
_BROADCAST: set[Any] = {F.binary_cross_entropy, F.binary_cross_entropy_with_logits}
_tensor: Any = Tensor  # for mypy, which types the properties differently
# Properties of an ordinary batch tensor.
_FACTS: dict[Any, Any] = {
    _tensor.requires_grad.__get__: False,
    _tensor.is_leaf.__get__: True,
    _tensor.grad_fn.__get__: None,
}
_TRACKING: set[Any] = {Tensor.requires_grad_, _tensor.requires_grad.__set__}
# Functions that use the shape, dtype or device of the batch, and no value.
_NEW: set[Any] = {
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty, Tensor.new_tensor),
    *(torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like),
    *(torch.rand_like, torch.randn_like, torch.randint_like),
}
# Functions that read values out of the graph.
_READS: set[Any] = {
    *(Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.tolist, Tensor.item),
    *(Tensor.__deepcopy__, Tensor.__reduce_ex__, Tensor.__repr__, Tensor.__format__),
    *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__),
}
