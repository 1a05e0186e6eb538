"""Local updates of a microbatch on a copy of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.clipping.base import Parameters
from clipwise.errors import StepError, UnsupportedModelError
from clipwise.layers.public_statistics import AllPublicStatistics

LocalUpdate = Callable[[nn.Module, Any], Mapping[str, Tensor] | None]


def local_changes(update: LocalUpdate, model: nn.Module, microbatch: Any, parameters: Parameters) -> dict[str, Tensor]:
    """The change of each parameter, returned by the update or read from its copy; 0 for omitted parameters."""
    own = copied(model)
    with torch.enable_grad():
        deltas = _called(update, own, microbatch)
    if deltas is None:
        now = dict(own.named_parameters())
        for name in parameters:
            if name not in now:
                raise StepError(
                    f"local_update removed parameter {name!r} from the model: return the changes by name instead."
                )
        deltas = {name: now[name].detach() - p.detach() for name, p in parameters.items()}
    _require_changes(deltas, parameters)
    return {
        name: _in_space_of(p, deltas[name].detach().to(p.device)) if name in deltas else torch.zeros_like(p)
        for name, p in parameters.items()
    }


def _require_changes(deltas: object, parameters: Parameters) -> None:
    if not isinstance(deltas, Mapping):
        raise StepError(
            "local_update must return a mapping from parameter names to changes, or None to use the changes of its "
            f"copy of the model, not {type(deltas).__name__}."
        )
    for name, delta in deltas.items():
        if name not in parameters:
            raise StepError(f"local_update returned {name!r}, which is not a trainable parameter of the model.")
        p = parameters[name]
        fits = isinstance(delta, Tensor) and delta.layout == torch.strided and not delta.is_meta
        if not fits or delta.shape != p.shape or not (p.is_complex() or delta.is_floating_point()):
            raise StepError(
                f"local_update: the change of {name!r} must be a dense tensor of "
                f"{'complex' if p.is_complex() else 'real'} numbers with the shape {tuple(p.shape)} of the parameter."
            )


def _in_space_of(p: Tensor, delta: Tensor) -> Tensor:
    """Convert the change of a complex parameter to a complex dtype."""
    return delta.to(torch.promote_types(delta.dtype, torch.complex64)) if p.is_complex() else delta


def _called(update: LocalUpdate, model: nn.Module, microbatch: Any) -> Mapping[str, Tensor] | None:
    """Call the update. torch's batch norm error on a single record contains the batch size, which is private."""
    try:
        return update(model, microbatch)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
    raise StepError(  # outside of the except block, so that it does not chain the original error
        "local_update: a batch norm layer in training mode got a single value per channel, for instance from a "
        "microbatch (or its last piece) of one record. Call clipwise.layers.without_running_statistics(model) before "
        "make_private, which supports this, or use GroupNorm."
    )


def copied(model: nn.Module) -> nn.Module:
    """A copy of the model for one local update. It is discarded afterwards."""
    try:
        copied = copy.deepcopy(model)
    except Exception as error:
        raise UnsupportedModelError(
            f"The model cannot be copied for local_update ({type(error).__name__}): keep no tensors with a gradient "
            "history, open files or locks in its attributes."
        ) from error
    AllPublicStatistics(copied).refresh()
    return copied


def name_of(function: Callable[..., Any]) -> str:
    """The qualified name of a function, for a configuration."""
    named = getattr(function, "func", function)  # of a functools.partial
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', type(named).__qualname__)}"
