"""Checks of the user's training loop around the steps of a private run.

The user steps the optimizer. Hooks on its `step` distinguish updates on released gradients from all others: a plain
`loss.backward(); optimizer.step()`, a framework with its own optimizer steps, a closure.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from clipwise.errors import ConfigurationError, StepError, warn

if TYPE_CHECKING:
    from clipwise.engine.context import StepContext

# By the id of a parameter. The run keeps the parameter alive.
_RUNS: WeakValueDictionary[int, StepContext] = WeakValueDictionary()
_LEAST_SCALE = 128.0  # of a GradScaler, which starts at 65536

DECLARED = ("public", "post-processing")


def require_alone(run: StepContext, parameters: Mapping[str, nn.Parameter]) -> StepContext | None:
    """Warn if another run trains the same parameters with another ledger, or has trained them.

    Returns an open run with the same model and ledger, or None.
    """
    found = None
    for name, p in parameters.items():
        other = _RUNS.get(id(p))
        if other is None:
            continue
        if other.ledger is run.ledger and not other.weights.is_closed:
            found = other if other.model is run.model else found
        elif other.ledger.position and other.ledger.run != run.ledger.run:
            warn(
                f"Parameter {name!r} was trained by another private run, which has another ledger. Their privacy "
                "losses add up, and neither statement counts the other run. Give both the same ledger, add up their "
                "ledgers by `clipwise epsilon`, or begin with new weights."
            )
            break
    _RUNS.update({id(p): run for p in parameters.values()})
    return found


def changed_since_last_run(
    model: nn.Module, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> list[str]:
    """Return the names of tensors that changed since the previous run of this model, while that run object exists.

    Nothing is reported if the model's tensors have other names since, or if that run changed nothing.
    """
    other = next((run for p in parameters.values() if (run := _RUNS.get(id(p))) is not None), None)
    if other is None or other.model is not model or not other.weights.state.is_of_same_tensors():
        return []
    weights = other.weights
    if not (other.ledger.position or weights.has_foreign_step or weights.unverified or weights.changed_before):
        return []
    changed = weights.without_averages(weights.state.changed(looks_inside=True))
    is_same_optimizer = weights.has_foreign_step and other.optimizer is optimizer
    return [*changed, *weights.changed_before, *(["the state of the optimizer"] if is_same_optimizer else [])]


def require_same_ranks(count: int) -> None:
    """Raise if torch.distributed got several ranks after `make_private` was called without them."""
    distributed = torch.distributed
    if count > 1 or not (distributed.is_available() and distributed.is_initialized()):
        return
    if (ranks := distributed.get_world_size()) > 1:
        raise ConfigurationError(
            f"torch.distributed has {ranks} ranks and was initialised after make_private: call init_process_group() "
            "first. Otherwise each process trains its own model and counts only its own releases."
        )


def require_process_group() -> None:
    """Raise in a process of torchrun without a process group: it would train its own model with its own ledger."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return
    ranks = os.environ.get("WORLD_SIZE", "") if "RANK" in os.environ else ""
    if ranks.isdecimal() and int(ranks) > 1:
        raise ConfigurationError(
            f"torchrun started {ranks} processes, and torch.distributed is not initialised: call "
            "torch.distributed.init_process_group() before make_private. Without it each process would draw its own "
            "batches and noise, train its own model and count only its own releases."
        )


def require_no_loss_scaling(losses: Tensor) -> None:
    """Raise if `GradScaler.scale` multiplied the losses: their last factor is then a tensor with a power of two."""
    node = losses.grad_fn
    if node is None or node.name() != "MulBackward0":
        return
    for factor in (getattr(node, "_saved_other", None), getattr(node, "_saved_self", None)):
        if isinstance(factor, Tensor) and factor.dim() == 0 and not factor.requires_grad:
            value = float(factor)
            if value >= _LEAST_SCALE and value.hex().startswith("0x1.0000000000000p"):
                raise StepError(
                    "losses were multiplied by a large power of two, as torch.amp.GradScaler.scale does. Loss scaling "
                    "does not help here: each example's gradient is clipped, so the factor only makes all of them "
                    "reach max_norm. Remove the scaler, call private.step(losses), and use autocast with "
                    "torch.bfloat16, which needs no scaling."
                )
