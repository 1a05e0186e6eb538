"""Checkpoints of a run over several ranks, by torch.distributed.checkpoint.

A checkpoint is a folder: the tensors of model, optimizer and averages, each rank's part in files of its own, and the
public state of the run (`clipwise.pt`). It holds no secret. It can be loaded with another number of ranks and another
layout. The secrets for an exact continuation are in the resume file, on the disk of rank 0.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from clipwise.engine.private import Private

_PUBLIC = "clipwise.pt"


def save(folder: str | os.PathLike[str], model: nn.Module, private: Private) -> None:
    """Write a checkpoint of the model and its run. All ranks call it; the folder must be on storage that all can reach.

    Args:
        folder: a new folder. An older checkpoint in it is overwritten.
        model: the model that was given to `make_private`.
        private: its run.
    """
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

    from clipwise.engine import checkpoint

    context = private._context
    context.ranks.exchange("state")
    state = private.state_dict()
    del state["optimizer"]
    weights, optimizer = get_state_dict(model, private.optimizer)
    averages = state["ema"].pop("averages") if "ema" in state else {}
    with _quiet():
        save_tensors({"model": weights, "optimizer": optimizer, "averages": averages}, checkpoint_id=folder)
    if context.ranks.is_first:
        checkpoint.save(Path(folder) / _PUBLIC, state)
    context.ranks.exchange("state")


def load(folder: str | os.PathLike[str], model: nn.Module, private: Private) -> None:
    """Load a checkpoint into the model, and continue its run. All ranks call it, in any number.

    As with `private.load_state_dict`, the run continues bit for bit after a clean end with the same configuration and
    resume file, up to the rounding of sums if the number of ranks differs. Otherwise it takes a fresh secret.
    """
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

    from clipwise.engine import checkpoint

    context = private._context
    context.ranks.exchange("state")
    state = checkpoint.load(Path(folder) / _PUBLIC)
    weights, optimizer = get_state_dict(model, private.optimizer)
    averages: dict[str, Any] = {}
    if context.plan.averages is not None and "ema" in state:
        averages = context.plan.averages.state_dict()["averages"]
    content = {"model": weights, "optimizer": optimizer, "averages": averages}
    with _quiet():
        load_tensors(content, checkpoint_id=folder)
    set_state_dict(model, private.optimizer, model_state_dict=weights, optim_state_dict=optimizer)
    for group in private.optimizer.param_groups:
        for p in group["params"]:
            p.grad = None  # torch makes gradients of zeros to find the optimizer's state
    if averages:
        state["ema"]["averages"] = content["averages"]
    state["optimizer"] = private.optimizer.state_dict()
    private.load_state_dict(state)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warnings that a single process saves alone, and that an older checkpoint is overwritten."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
        warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
        yield
