"""Per-example losses of a training step that computes one mean loss.

Training frameworks call `loss.backward()` on the mean over the batch. A private step needs the terms before the mean.
`LossTerms` is a torch function mode: while it is active it computes the reduced losses of `torch.nn.functional`
without reduction, records the terms, and follows them through sums and constant factors.

Shapes: B examples, T positions of an example.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from clipwise.errors import StepError

_REDUCED = {
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.cosine_embedding_loss,
    F.cross_entropy,
    F.gaussian_nll_loss,
    F.hinge_embedding_loss,
    F.huber_loss,
    F.kl_div,
    F.l1_loss,
    F.margin_ranking_loss,
    F.mse_loss,
    F.multi_margin_loss,
    F.multilabel_margin_loss,
    F.multilabel_soft_margin_loss,
    F.nll_loss,
    F.poisson_nll_loss,
    F.smooth_l1_loss,
    F.soft_margin_loss,
    F.triplet_margin_loss,
}
_MEANS = {torch.mean, Tensor.mean}
_SAME = {Tensor.clone, torch.clone, Tensor.contiguous, Tensor.squeeze, torch.squeeze}
_CASTS = {Tensor.to, Tensor.float, Tensor.double, Tensor.type}
_SUMS = {
    torch.add: 1.0,
    Tensor.add: 1.0,
    Tensor.__radd__: 1.0,
    Tensor.__iadd__: 1.0,
    Tensor.add_: 1.0,
    torch.sub: -1.0,
    Tensor.sub: -1.0,
    Tensor.__rsub__: -1.0,
    Tensor.__isub__: -1.0,
    Tensor.sub_: -1.0,
}
_PRODUCTS: dict[Any, Callable[[Any, Any], Any]] = {
    torch.mul: operator.mul,
    Tensor.mul: operator.mul,
    Tensor.__rmul__: operator.mul,
    Tensor.__imul__: operator.mul,
    Tensor.mul_: operator.mul,
    torch.div: operator.truediv,
    Tensor.div: operator.truediv,
    torch.true_divide: operator.truediv,
    Tensor.true_divide: operator.truediv,
    Tensor.__itruediv__: operator.truediv,
    Tensor.div_: operator.truediv,
}
_NEGATIONS = {torch.neg, Tensor.neg}

WITHOUT_TERMS = (
    "The per-example terms of the loss are not known. It must be the mean over the batch of one loss per example, such "
    "as nn.CrossEntropyLoss(), or a sum of such means with constant factors; not a sum over the batch or a vector. A "
    "penalty on the weights belongs in weight_decay of the optimizer. For another loss call private.step(losses) in "
    "a loop of your own, with one loss per example."
)


@dataclass
class _Unreduced:
    """A loss before its reduction, and which of its elements count."""

    values: Tensor
    is_counted: Tensor | None  # None: all


class LossTerms(TorchFunctionMode):
    """While active, finds the per-example terms of mean losses.

    The mean of an example is taken over its own elements. Elements with an ignored label do not count, so the length
    or padding of one example never scales the loss of another.

    Args:
        size: the number of examples in the batch.
        on_backward: called with the per-example losses in place of `loss.backward()`; None runs it unchanged.
        batch_first: whether losses have the shape (B, T, ...), or (T, B, ...); also where the two axes are flattened.

    Attributes:
        is_active: whether losses are followed. If False, every function runs unchanged.
    """

    def __init__(
        self, size: int, on_backward: Callable[[Tensor], object] | None = None, *, batch_first: bool = True
    ) -> None:
        super().__init__()
        self._size = size
        self.on_backward = on_backward
        self.is_active = True
        self._batch_first = batch_first
        self._terms = WeakTensorKeyDictionary()

    def of(self, loss: Tensor) -> Tensor:
        """One loss per example, whose mean is `loss` where every example has as many elements.

        Raises:
            StepError: if the terms of this loss are not known.
        """
        found = self._known(loss)
        if found is None:
            raise StepError(WITHOUT_TERMS)
        return found

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`; record the terms of its result if it is a mean loss or is computed from mean losses."""
        kwargs = kwargs or {}
        if not self.is_active:
            return func(*args, **kwargs)
        if func is Tensor.backward and self.on_backward is not None:
            _require_plain_backward(*args[1:], **kwargs)
            return self.on_backward(self.of(args[0]))
        if func in _REDUCED:
            return self._reduced(func, args, kwargs)
        if func in _MEANS:
            return self._mean(func, args, kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.dim() == 0 and result.requires_grad:
            terms = self._followed(func, args, kwargs)
            self._terms.pop(result, None)  # type: ignore[no-untyped-call]  # those before a change in place
            if terms is not None:
                self._terms[result] = terms
        return result

    def _known(self, loss: Tensor) -> Tensor | None:
        found: Tensor | None = self._terms.get(loss)  # type: ignore[no-untyped-call]
        return found

    def _reduced(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        bound = _signature(func).bind(*args, **kwargs)
        reduction = bound.arguments.get("reduction", "mean")
        if reduction not in ("mean", "batchmean") or bound.arguments.get("reduce") is not None:
            return func(*args, **kwargs)
        bound.arguments["reduction"] = "none"
        values = func(*bound.args, **bound.kwargs)
        if not values.requires_grad:  # an evaluation, on data of any size
            return func(*args, **kwargs)
        unreduced = _Unreduced(values, _counted(func, bound))
        result = func(*args, **kwargs).detach()
        terms = self._per_example(unreduced, is_summed=reduction == "batchmean")
        return self._keep(terms, result)

    def _mean(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        of = args[0]
        if result.dim() or not result.requires_grad:
            return result
        if of.dim() == 0:  # a loss that is reduced already
            terms = self._known(of)
        else:
            losses_BT = self._rows(of)
            terms = None if losses_BT is None else _means(losses_BT)
        if terms is not None:
            self._terms[result] = terms
        return result

    def _keep(self, terms: Tensor, result: Tensor) -> Tensor:
        """The mean as a tensor with the terms' graph and with the value that the framework expects."""
        mean = terms.mean() if len(terms) else terms.sum()
        shown = mean + (result - mean.detach()) if len(terms) else mean
        self._terms[shown] = terms
        return shown

    def _per_example(self, loss: _Unreduced, is_summed: bool = False) -> Tensor:
        """Shape (B,): the mean, or the sum, over the counted elements of each example."""
        losses_BT = self._rows(loss.values)
        if losses_BT is None:
            raise StepError(
                "The loss has neither one row for each example of the batch nor the same number of rows for each. "
                "Compute one loss per example and call private.step(losses) in a loop of your own."
            )
        if is_summed:
            return losses_BT.sum(1)
        counted_BT = None if loss.is_counted is None else self._rows(loss.is_counted)
        return _means(losses_BT) if counted_BT is None else losses_BT.sum(1) / counted_BT.sum(1).clamp(min=1)

    def _rows(self, values: Tensor) -> Tensor | None:
        """The elements by example, of shape (B, T); None if the axis of the examples is not known.

        Which axis it is must not depend on the batch size, which may equal T by chance.
        """
        size = self._size
        if size == 1 and values.dim() == 0:  # squeeze() removed the axis
            return values.reshape(1, 1)
        if values.dim() > 1 and not self._batch_first:
            values = values.transpose(0, 1)
        if values.dim() and values.shape[0] == size:
            return values.reshape(size, -1) if size else values.reshape(0, 0)
        if size == 0 or values.dim() == 0 or values.shape[0] % size:
            return None
        if self._batch_first:
            return values.reshape(size, -1)
        return values.reshape(-1, size).t() if values.dim() == 1 else None

    def _followed(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor | None:
        """The terms of a sum of losses, or of a loss with a constant factor; None if they are not known."""
        if func in _SAME or func in _CASTS:
            return self._known(args[0])
        if func in _NEGATIONS:
            terms = self._known(args[0])
            return None if terms is None else -terms
        if kwargs or len(args) != 2:  # alpha, out, rounding_mode
            return None
        if func in _SUMS:
            return self._sum(func, *args)
        return self._product(func, *args) if func in _PRODUCTS else None

    def _sum(self, func: Callable[..., Any], first: Any, second: Any) -> Tensor | None:
        sign = _SUMS[func]
        if func is Tensor.__rsub__:
            first, second = second, first
        left, right = self._summand(first), self._summand(second)
        if left is None or right is None:
            return None
        return torch.as_tensor(left + sign * right)

    def _summand(self, value: Any) -> Tensor | float | None:
        """The terms of a loss; 0 for a constant, which has no gradient; None if unknown."""
        if not isinstance(value, Tensor) or not value.requires_grad:
            return 0.0
        return self._known(value)

    def _product(self, func: Callable[..., Any], first: Any, second: Any) -> Tensor | None:
        combine = _PRODUCTS[func]
        for loss, factor in ((first, second), (second, first)):
            terms = self._known(loss) if isinstance(loss, Tensor) else None
            if terms is None or (isinstance(factor, Tensor) and (factor.requires_grad or factor.dim())):
                continue
            if combine is operator.truediv and loss is second:
                return None
            return torch.as_tensor(combine(terms, factor))
        return None


def _require_plain_backward(gradient: Any = None, *_: Any, inputs: Any = None, **__: Any) -> None:
    if gradient is not None or inputs is not None:
        raise StepError(
            "backward() was called with gradient= or inputs=, which a private backward pass does not have: multiply "
            "the loss by a constant, or freeze parameters by requires_grad_(False) before the run is made."
        )


def _means(losses_BT: Tensor) -> Tensor:
    return losses_BT.mean(1) if losses_BT.shape[1] else losses_BT.sum(1)


def _counted(func: Callable[..., Any], bound: inspect.BoundArguments) -> Tensor | None:
    """Which labels are not ignored, for losses that ignore labels; None if all count."""
    if func not in (F.cross_entropy, F.nll_loss):
        return None
    target: Tensor = bound.arguments["target"]
    if target.is_floating_point():  # class probabilities
        return None
    return torch.ne(target, bound.arguments.get("ignore_index", -100))


@lru_cache(maxsize=64)
def _signature(func: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(func)
