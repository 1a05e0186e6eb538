"""From losses to each example's gradient at the model's outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clipwise.clipping.base import Parameters
from clipwise.clipping.row_by_row import is_row_by_row
from clipwise.errors import CoupledExamplesError, StepError
from clipwise.gradients.layout import probe_weights
from clipwise.gradients.walk import Node

# Relative to a row's length. A loss that takes in the mean of all others is off by about as much as it is long.
_ROUNDING = 1e-4
_TINY = 1e-25  # below, numbers are rounded to other multiples


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
