"""Per-example gradients of the losses at the model's outputs, with checks for coupled examples."""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.clipping.base import Parameters
from clipwise.errors import StepError
from clipwise.gradients.layout import probe_weights
from clipwise.gradients.walk import Node, graph_nodes
from clipwise.layers.bounded import row_norms

# Relative to the norm of a row. A loss with a mean over the batch has an error of about the norm.
_ROUNDING = 1e-4
_TINY = 1e-25  # absolute tolerance, for subnormal numbers


def gradients_at_outputs(losses: Tensor, outputs: Tensor, parameters: Parameters) -> tuple[Tensor, Tensor]:
    """Each example's gradient at its outputs, and whether a loss depends on another example's outputs.

    The second is a tensor, still on the device. Raises if the losses depend on parameters other than through the
    outputs. If each loss depends on its own outputs only, weights w_i on the losses multiply row j of the gradient by
    w_j.
    """
    if outputs.dim() == 0 or len(outputs) == 0 or len(outputs) % len(losses):
        raise StepError(
            "outputs does not have one row for each example of the batch: pass the outputs of the model for it."
        )
    _require_only_through(losses, outputs, parameters)
    plain = _gradient(losses, outputs, torch.ones_like(losses))
    if len(losses) == 1:
        return plain, torch.zeros((), dtype=torch.bool, device=plain.device)
    weights_B = probe_weights(len(losses), losses)
    rows = len(outputs) // len(losses)
    expected = plain * weights_B.to(plain).repeat_interleave(rows).view(-1, *[1] * (plain.dim() - 1))
    return plain, _differ(_gradient(losses, outputs, weights_B), expected)


def _differ(found: Tensor, expected: Tensor) -> Tensor:
    """Whether a finite row differs by more than rounding, relative to its norm, since single entries may cancel."""
    lengths, errors = row_norms(expected), row_norms(found - expected)
    is_off: Tensor = torch.isfinite(lengths) & ~(errors <= _ROUNDING * lengths + _TINY)
    return is_off.any()


def _gradient(losses: Tensor, outputs: Tensor, weights_B: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(losses, outputs, weights_B, retain_graph=True, allow_unused=True)
    if found is None:
        raise StepError("losses were not computed from outputs: pass the outputs of the model for this batch.")
    return found.detach()


def _require_only_through(losses: Tensor, outputs: Tensor, parameters: Parameters) -> None:
    """Raise if the losses depend on a parameter other than through the outputs."""
    names = {id(p): name for name, p in parameters.items()}
    root: Node = losses.grad_fn
    if root is None:
        raise StepError("losses carries no gradient: compute it from the model's output.")
    for node in graph_nodes(root, end=outputs.grad_fn):
        name = names.get(id(getattr(node, "variable", None)))
        if name is not None:
            raise StepError(
                f"losses depend on parameter {name!r} other than through outputs, and this part of the gradient would "
                "be lost. Pass a penalty on the weights as make_private(..., penalty=f), or use the optimizer's "
                "weight_decay. Use only one forward pass."
            )
