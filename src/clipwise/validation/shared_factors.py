"""Detect losses that are all scaled by one number of the batch.

    sum_i clip(g_i / n),    n = the realised batch size, the number of valid tokens, the sum of class weights

The contribution of an unclipped example depends on n, so one record moves the contributions of all others: by up to
(number of examples) x C. n is computed from integers, so no gradient shows it. The saved factors in the graph do: those
of linear operations at the end of the losses' graph are read. This is a lint as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from clipwise.errors import CoupledExamplesError
from clipwise.gradients.outline import named
from clipwise.gradients.walk import Node
from clipwise.validation.marked import MarkedTensor, plain

_SCALES = named("Div", "Mul")
# Operations through which the losses stay a sum of terms times factors.
_LINEAR = _SCALES | named(
    *("Add", "Sub", "Rsub", "Neg", "Sum", "Mean", "Where", "MaskedFill", "Cat", "Stack", "Clone", "ToCopy"),
    *("View", "UnsafeView", "ReshapeAlias", "Alias", "Squeeze", "Unsqueeze", "Expand", "Permute"),
    *("Transpose", "T", "Slice", "Select", "Index", "IndexPut", "IndexAdd", "ScatterAdd", "MaskedSelect"),
    "MaskedScatter",
)
_NEAR = 1e-5  # relative: 1 / n may be rounded in float32
_IGNORED = (-100, -1, 0)  # the usual labels of ignored positions
_SIZE = (
    "losses are divided by the number of examples in the batch, which is random and secret: with one record more or "
    "less the losses of all others would change. Remove the division: private.step already divides by a constant."
)
SHARED = (
    "losses are multiplied or divided by a number that is computed from the whole batch, such as its number of valid "
    "tokens or the sum of its class weights. One record changes that number, and with it the gradients of all others, "
    "so clipping single examples bounds nothing. Divide each example by its own count, as in (token_losses * "
    "mask).sum(1) / mask.sum(1).clamp(min=1), or by a public constant. If the number is a schedule that does not "
    "depend on the data, give it as a Python float."
)


class SharedFactors:
    """Raises if the losses' graph has a factor that is a number of the batch.

    - A number computed from the batch's own tensors is refused at once.
    - An integer, or a tensor with one number, is refused if it changes between batches.
    - A Python float may change (a schedule), unless on two batches it was n or 1 / n, with n the realised batch size
      or a count of valid entries.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._before: dict[int, float] = {}  # the factor at each place in the graph
        self._sizes: defaultdict[int, set[int]] = defaultdict(set)  # batch sizes that it was equal to
        self._counts: defaultdict[int, set[float]] = defaultdict(set)  # counts that it was equal to

    def examine(self, losses: Tensor, batch: Sequence[Tensor]) -> bool:
        """Check the factors of one batch. Returns whether a factor was 0 and is not now."""
        try:
            return self._examine(losses, batch)
        except CoupledExamplesError:
            self._forget()  # the next attempt starts from the beginning
            raise

    def _examine(self, losses: Tensor, batch: Sequence[Tensor]) -> bool:
        has_woken = False
        for place, saved in _factors(losses.grad_fn):
            if isinstance(saved, MarkedTensor) and saved.is_pooled:
                raise CoupledExamplesError(SHARED)
            if not _is_one_number(saved):
                continue
            now = float(saved.flatten()[0])
            before = self._before.get(place, now)
            self._before[place] = now
            self._compare_size(place, now, len(losses))
            if now == before:
                continue
            has_woken |= before == 0
            is_python_float = saved.dim() == 0 and saved.dtype == torch.float64 and saved.device.type == "cpu"
            if not is_python_float:
                raise CoupledExamplesError(SHARED)
            if any(_is_near(now, count) for count in _counts(batch)):
                self._counts[place].add(now)
                if len(self._counts[place]) > 1:
                    raise CoupledExamplesError(SHARED)
        return has_woken

    def _compare_size(self, place: int, factor: float, size: int) -> None:
        """Raise if the factor equals the size of two batches of different sizes: a constant cannot."""
        if not _is_near(factor, size):
            self._sizes.pop(place, None)
            return
        self._sizes[place].add(size)
        if len(self._sizes[place]) > 1:
            raise CoupledExamplesError(_SIZE)


def _factors(root: Node) -> Iterator[tuple[int, Tensor]]:
    """Yield the factors of the losses' terms, each with its place: a hash of the operations on the path to it."""
    stack: list[tuple[Node, int]] = [(root, 0)]
    entered = {root}
    while stack:
        node, path = stack.pop()
        name = node.name()
        if name not in _LINEAR:
            continue
        if name in _SCALES:
            for attribute in ("_saved_other", "_saved_self"):
                saved = getattr(node, attribute, None)
                if isinstance(saved, Tensor):
                    yield hash((path, name, attribute)), saved
        for number, (child, _) in enumerate(node.next_functions):
            if child is not None and child not in entered:
                entered.add(child)
                stack.append((child, hash((path, name, number))))


def _is_one_number(saved: Tensor) -> bool:
    """Whether a factor without gradient holds one number, possibly expanded."""
    if saved.requires_grad or saved.numel() == 0 or saved.dtype.is_complex:
        return False
    return not any(size > 1 and stride for size, stride in zip(saved.shape, saved.stride(), strict=True))


def _is_near(factor: float, count: float) -> bool:
    return any(abs(factor - wanted) <= _NEAR * wanted for wanted in (count, 1 / count))


def _counts(batch: Sequence[Tensor]) -> set[float]:
    """Return counts of valid entries by the usual rules, with and without the first position."""
    found: set[float] = set()
    for tensor in map(plain, batch):
        is_mask = not tensor.is_floating_point() and not tensor.is_complex()
        if is_mask or tensor.dim() <= 2:
            for t in (tensor, tensor[:, 1:]) if tensor.dim() > 1 else (tensor,):
                sums = (t.sum(), *((t != label).sum() for label in _IGNORED))
                found.update(abs(float(count)) for count in sums)
    return {count for count in found if count > 1}
