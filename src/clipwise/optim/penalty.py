"""A penalty on the weights. Its gradient is added after the noise, since it does not depend on the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from clipwise.errors import ConfigurationError, StepError

Penalty = Callable[[nn.Module], Tensor]


def require_penalty(given: object, model: nn.Module) -> None:
    """Raise for a penalty that fails on this model, before the first release."""
    if given is None:
        return
    if not callable(given):
        raise ConfigurationError(f"penalty must be a function from the model to a number, not {type(given).__name__}.")
    try:
        _gradients(given, model, [p for p in model.parameters() if p.requires_grad])
    except StepError as error:
        raise ConfigurationError(str(error)) from error
    except Exception as error:
        raise ConfigurationError(
            f"penalty(model) failed ({type(error).__name__}: {error}): give a function from the model to a number."
        ) from error


def add_penalty(penalty: Penalty, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Add its gradient to every `.grad`. It is post-processing of the released weights."""
    found = _gradients(penalty, model, list(parameters.values()))
    for p, gradient in zip(parameters.values(), found, strict=True):
        if gradient is not None:
            assert p.grad is not None
            p.grad.add_(gradient)


def _gradients(penalty: Penalty, model: nn.Module, parameters: list[nn.Parameter]) -> tuple[Tensor | None, ...]:
    with torch.enable_grad():
        value = penalty(model)
    is_number = isinstance(value, Tensor) and value.dim() == 0 and value.requires_grad
    found: tuple[Tensor | None, ...] = ()
    if is_number:
        found = torch.autograd.grad(value, parameters, allow_unused=True)
    if all(g is None for g in found):
        raise StepError("penalty must return a single number that depends on the model's trainable weights.")
    finite = [torch.isfinite(t.detach()).all().cpu() for t in (value, *found) if t is not None]
    if not bool(torch.stack(finite).all()):
        raise StepError(
            "penalty or its gradient is not finite at these weights, and the update would destroy them: check how the "
            "penalty is computed."
        )
    return found
