"""Per-example gradients of the losses at the model's outputs, with checks for coupled examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clipwise.clipping.base import Parameters
from clipwise.errors import CoupledExamplesError, StepError
from clipwise.gradients.layout import probe_weights
from clipwise.gradients.walk import Node

# Relative to the norm of a row. A loss with a mean over the batch has an error of about the norm.
_ROUNDING = 1e-4
_TINY = 1e-25  # absolute tolerance, for subnormal numbers
Shape = Sequence[int]


@dataclass(frozen=True)
class AtOutputs:
    """The gradient of the sum of losses at the outputs.

    Args:
        gradients: a tensor with the shape of the outputs.
        rows: the number of output rows per example.
        are_coupled: whether a loss depends on another example's outputs, possibly still on the device: see
            `require_not_coupled`.
    """

    gradients: Tensor
    rows: int
    are_coupled: Tensor | bool


def gradients_at_outputs(losses: Tensor, outputs: Tensor, parameters: Parameters) -> AtOutputs:
    """Each example's gradient at its outputs. The caller must check `are_coupled`.

    Raises if the losses depend on parameters other than through the outputs. If each loss depends on its own outputs
    only, weights w_i on the losses multiply row j of the gradient by w_j.
    """
    rows = _rows_each(losses, outputs)
    _require_only_through(losses, outputs, parameters)
    plain = _gradient(losses, outputs, torch.ones_like(losses))
    if len(losses) == 1:
        return AtOutputs(plain, rows, False)
    weights_B = probe_weights(len(losses), losses)
    expected = plain * weights_B.to(plain).repeat_interleave(rows).view(-1, *[1] * (plain.dim() - 1))
    return AtOutputs(plain, rows, _differ(_gradient(losses, outputs, weights_B), expected))


def require_not_coupled(are_coupled: bool) -> None:
    """Raise if a loss depends on another example's outputs."""
    if are_coupled:
        raise CoupledExamplesError(
            "The loss of one example depends on the outputs of another, so per-example bounds do not hold. Usual "
            "causes: subtracting a mean over the batch, comparing examples, or dividing by a quantity of the whole "
            "batch."
        )


def asked_together(*answers: Tensor | bool) -> list[bool]:
    """The values as bools; those on a device are read in one transfer."""
    far = [answer for answer in answers if isinstance(answer, Tensor)]
    values = iter(torch.stack(far).tolist() if len(far) > 1 else map(bool, far))
    return [next(values) if isinstance(answer, Tensor) else answer for answer in answers]


def _differ(found: Tensor, expected: Tensor) -> Tensor:
    """Whether a finite row differs by more than rounding, relative to its norm, since single entries may cancel."""
    lengths, errors = (
        torch.linalg.vector_norm(t.flatten(1) if t.dim() > 1 else t.unsqueeze(1), dim=1, dtype=torch.float64)
        for t in (expected, found - expected)
    )
    is_off: Tensor = torch.isfinite(lengths) & ~(errors <= _ROUNDING * lengths + _TINY)
    return is_off.any()


def _gradient(losses: Tensor, outputs: Tensor, weights_B: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(losses, outputs, weights_B, retain_graph=True, allow_unused=True)
    if found is None:
        raise StepError("losses were not computed from outputs: pass the outputs of the model for this batch.")
    return found.detach()


def require_outputs(outputs: object) -> None:
    """Raise if the outputs are not a tensor."""
    if not isinstance(outputs, Tensor):
        raise StepError(f"outputs must be the tensor that the model returned, not {type(outputs).__name__}.")


def _rows_each(losses: Tensor, outputs: Tensor) -> int:
    if outputs.dim() == 0 or len(outputs) == 0 or len(outputs) % len(losses):
        raise StepError(
            "outputs does not have one row for each example of the batch: pass the outputs of the model for it."
        )
    return len(outputs) // len(losses)


def _require_only_through(losses: Tensor, outputs: Tensor, parameters: Parameters) -> None:
    """Raise if the losses depend on a parameter other than through the outputs."""
    names = {id(p): name for name, p in parameters.items()}
    root: Node = losses.grad_fn
    if root is None:
        raise StepError("losses carries no gradient: compute it from the model's output.")
    for node in _between(root, outputs.grad_fn):
        name = names.get(id(getattr(node, "variable", None)))
        if name is not None:
            raise StepError(
                f"losses depend on parameter {name!r} other than through outputs, and this part of the gradient would "
                "be lost. Pass a penalty on the weights as make_private(..., penalty=f), or use the optimizer's "
                "weight_decay. Use only one forward pass."
            )


class RepeatedOutputs:
    """Raises if broadcasting in the losses adds a second dimension of the batch size.

    Outputs (B, 1) minus targets (B,) are (B, B), so every loss depends on the targets of all examples. The gradient at
    the outputs does not show this, because outputs are not combined; the shapes in the graph do. A public size (10
    thresholds, say) may equal the batch size by chance: a sequence of operations that passed once is not checked again.
    """

    def __init__(self) -> None:
        self._harmless: set[tuple[str, ...]] = set()

    def require_none(self, losses: Tensor, outputs: Tensor) -> None:
        """Check every operation between the outputs and the losses."""
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
                        "so the loss of one depends on the targets of all. Usual cause: outputs of shape (B, 1) and "
                        "targets of shape (B,): give targets the shape of the outputs. (If another dimension equals "
                        "the batch size by chance, use another batch size.)"
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
    """Whether a result has more entries and more dimensions of the batch size than each operand."""
    found = _count(made, sizes)
    return found > 1 and all(math.prod(made) > math.prod(t) and found > _count(t, sizes) for t in taken)


def _count(shape: Shape, sizes: set[int]) -> int:
    return sum(n in sizes for n in shape)
