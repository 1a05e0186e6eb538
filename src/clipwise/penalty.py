"""A penalty on the weights, added to a gradient after its noise: it knows nothing of the data and needs none."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from clipwise.errors import ConfigurationError, StepError

Penalty = Callable[[nn.Module], Tensor]


def require_penalty(given: object) -> None:
    """Refuse what cannot be called."""
    if given is not None and not callable(given):
        raise ConfigurationError(
            f"penalty must be a function from the model to a number, not {type(given).__name__}."
        )


def add_penalty(penalty: Penalty, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Add its gradient to every `.grad`. The weights are released, so this is post-processing."""
    with torch.enable_grad():
        value = penalty(model)
    if not isinstance(value, Tensor) or value.dim() != 0 or not value.requires_grad:
        raise StepError("penalty must return a single number that depends on the model's trainable weights.")
    found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    for p, gradient in zip(parameters.values(), found, strict=True):
        if gradient is not None:
            assert p.grad is not None
            p.grad.add_(gradient)
