"""From losses to each example's gradient at the model's outputs; losses that couple examples are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clipwise.clipping.base import Parameters
from clipwise.errors import CoupledExamplesError, StepError
from clipwise.gradients.layout import probe_weights
from clipwise.gradients.walk import Node

# Relative to a row's length. A loss that takes in the mean of all others is off by about as much as it is long.
_ROUNDING = 1e-4
_TINY = 1e-25  # below, numbers are rounded to other multiples
_HALF = 2**63
Shape = Sequence[int]


@dataclass(frozen=True)
class AtOutputs:
    """The gradient of the sum of losses at the outputs.

    Args:
        gradients: of the shape of the outputs.
        rows: how many of the outputs' rows each example has.
        are_coupled: whether a loss depends on another example's outputs, perhaps still on the device: see
            `require_not_coupled`.
    """

    gradients: Tensor
    rows: int
    are_coupled: Tensor | bool


def gradients_at_outputs(losses: Tensor, outputs: Tensor, parameters: Parameters) -> AtOutputs:
    """Each example's gradient at its outputs. Whoever takes it asks whether examples are coupled.

    Refuses losses that depend on parameters in another way than through the outputs. Losses depend on their own
    outputs only if, with weights w_i on the losses, row j of the gradient becomes w_j times what it was. Operations
    that are known to leave rows alone need no such test.
    """
    rows = _rows_each(losses, outputs)
    _require_only_through(losses, outputs, parameters)
    ones_B = torch.ones_like(losses)
    plain = _gradient(losses, outputs, ones_B)
    is_near = plain.device.type == "cpu"  # elsewhere a comparison would have to be waited for
    if len(losses) == 1 or (is_near and is_row_by_row(plain, losses, outputs, ones_B)):
        return AtOutputs(plain, rows, False)
    weights_B = probe_weights(len(losses), losses)
    expected = plain * weights_B.to(plain).repeat_interleave(rows).view(-1, *[1] * (plain.dim() - 1))
    return AtOutputs(plain, rows, _differ(_gradient(losses, outputs, weights_B), expected))


def require_not_coupled(are_coupled: bool) -> None:
    """Refuse losses that depend on another example's outputs."""
    if are_coupled:
        raise CoupledExamplesError(
            "The loss of one example depends on the outputs of another, so that no bound of single examples holds. "
            "Usual causes: subtracting a mean over the batch, a loss that compares examples or is divided by "
            "something of the whole batch."
        )


def asked_together(*answers: Tensor | bool) -> list[bool]:
    """Yes or no of each; those on a device are read in one transfer."""
    far = [answer for answer in answers if isinstance(answer, Tensor)]
    values = iter(torch.stack(far).tolist() if len(far) > 1 else map(bool, far))
    return [next(values) if isinstance(answer, Tensor) else answer for answer in answers]


def _differ(found: Tensor, expected: Tensor) -> Tensor:
    """Whether a finite row is off by more than rounding: its length tells, since single numbers may cancel."""
    lengths, errors = (
        torch.linalg.vector_norm(t.flatten(1) if t.dim() > 1 else t.unsqueeze(1), dim=1, dtype=torch.float64)
        for t in (expected, found - expected)
    )
    is_off: Tensor = torch.isfinite(lengths) & ~(errors <= _ROUNDING * lengths + _TINY)
    return is_off.any()


def _gradient(losses: Tensor, outputs: Tensor, weights_B: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(losses, outputs, weights_B, retain_graph=True, allow_unused=True)
    if found is None:
        raise StepError("losses were not computed from outputs: give what the model returned for this batch.")
    return found.detach()


def require_outputs(outputs: object) -> None:
    """Refuse what no model returns here."""
    if not isinstance(outputs, Tensor):
        raise StepError(f"outputs must be the tensor that the model returned, not {type(outputs).__name__}.")


def _rows_each(losses: Tensor, outputs: Tensor) -> int:
    if outputs.dim() == 0 or len(outputs) == 0 or len(outputs) % len(losses):
        raise StepError(
            "outputs does not have one row for each example of the batch: give what the model returned for it."
        )
    return len(outputs) // len(losses)


def _require_only_through(losses: Tensor, outputs: Tensor, parameters: Parameters) -> None:
    """No way from the losses to a parameter goes around the outputs."""
    names = {id(p): name for name, p in parameters.items()}
    root: Node = losses.grad_fn
    if root is None:
        raise StepError("losses carries no gradient: compute it from the model's output.")
    entered, stack = {outputs.grad_fn, root}, [] if root is outputs.grad_fn else [root]
    while stack:
        node = stack.pop()
        name = names.get(id(getattr(node, "variable", None)))
        if name is not None:
            raise StepError(
                f"losses depend on parameter {name!r} in another way than through outputs, and that part would be "
                "lost. A penalty on the weights is no matter of the data: give it as make_private(..., penalty=f), or "
                "take the optimizer's weight_decay. Of several forward passes, only one can be given."
            )
        for child, _ in node.next_functions:
            if child is not None and child not in entered:
                entered.add(child)
                stack.append(child)


@torch.no_grad()
def is_row_by_row(gradient: Tensor, losses: Tensor, outputs: Tensor, weights_B: Tensor) -> bool:
    """Whether `gradient`, that of sum_i w_i loss_i at the outputs, is made row by row by known operations.

    They are called one after another, without the engine of autograd and so without any hook, which could do anything
    to a gradient. What comes out has in row i nothing but row i of the outputs, and must be the same bit by bit. False
    means that nothing is known. It waits for the device.
    """
    found = weights_B
    node: Any = losses.grad_fn
    place = losses.output_nr
    while node is not outputs.grad_fn:
        is_known = _KNOWN.get(node.name()) if node is not None and place == 0 else None
        if is_known is None or not is_known(node, found):
            return False
        made = node(found)
        found = made[0] if isinstance(made, tuple) else made
        (node, place), *others = node.next_functions
        if any(other is not None for other, _ in others):
            return False
    return place == outputs.output_nr and gradient.shape == found.shape and gradient.equal(found)


def _is_nll_of_each(node: Any, gradient: Tensor) -> bool:
    """-z_{i, y_i} of each row i: not their sum or mean, and of rows, not of one vector."""
    return bool(node._saved_reduction == 0 and gradient.dim() == 1)


def _is_within_rows(node: Any, gradient: Tensor) -> bool:
    """Along another dimension than the first. Torch gives -1 as 2^64 - 1."""
    dim = node._saved_dim if node._saved_dim < _HALF else node._saved_dim - 2 * _HALF
    return bool(gradient.dim() > 1 and dim % gradient.dim() != 0)


def _is_by_number(node: Any, gradient: Tensor) -> bool:
    """Times or over a number of the code, such as a temperature."""
    other = node._saved_other
    return isinstance(other, Tensor) and other.dim() == 0 and not other.requires_grad


_KNOWN: dict[str, Callable[[Any, Tensor], bool]] = {
    "NllLossBackward0": _is_nll_of_each,
    "LogSoftmaxBackward0": _is_within_rows,
    "DivBackward0": _is_by_number,
    "MulBackward0": _is_by_number,
}


class RepeatedOutputs:
    """Refuses losses in whose graph values get a second dimension as long as the batch.

    Outputs (B, 1) minus targets (B,) are (B, B): every loss then depends on the targets of all examples. A gradient at
    the outputs does not show it, because no output is combined with another one. The shapes in the graph do. A public
    size (10 thresholds, say) may happen to be that of a batch: operations that made no such dimension for a batch of
    another size are not examined again.
    """

    def __init__(self) -> None:
        self._harmless: set[tuple[str, ...]] = set()

    def require_none(self, losses: Tensor, outputs: Tensor) -> None:
        """Look at every operation between the outputs and the losses."""
        if len(losses) < 2 or losses.grad_fn is None:
            return
        nodes = _between(losses.grad_fn, outputs.grad_fn)
        wiring = tuple(node.name() for node in nodes)
        if wiring in self._harmless:
            return
        sizes = {len(losses), len(outputs)}
        for node in nodes:
            taken = [child._input_metadata[i].shape for child, i in node.next_functions if child is not None]
            for made in (m.shape for m in node._input_metadata):
                if taken and _is_repeated(made, taken, sizes):
                    raise CoupledExamplesError(
                        f"losses: {node.name().removesuffix('Backward0')} makes one entry for each pair of examples, "
                        "so that the loss of one depends on the targets of all. Usual cause: outputs of the shape (B, "
                        "1) and targets of the shape (B,): give targets the shape of the outputs. (If a dimension of "
                        "yours happens to be as long as the batch, take another batch size.)"
                    )
        self._harmless.add(wiring)


def _between(root: Node, end: Node | None) -> list[Node]:
    found, entered = [] if root is end else [root], {None, root, end}
    for node in found:  # grows on the way
        for child, _ in node.next_functions:
            if child not in entered:
                entered.add(child)
                found.append(child)
    return found


def _is_repeated(made: Shape, taken: Sequence[Shape], sizes: set[int]) -> bool:
    """More numbers than any operand has, and more dimensions as long as the batch."""
    found = _count(made, sizes)
    return found > 1 and all(math.prod(made) > math.prod(t) and found > _count(t, sizes) for t in taken)


def _count(shape: Shape, sizes: set[int]) -> int:
    return sum(n in sizes for n in shape)
