"""Private training in a loop that uses `accelerate.Accelerator`, in one process.

`accelerator.backward(loss)`, `optimizer.step()` and `optimizer.zero_grad()` of the loop stay as they are. It does not
matter whether `accelerator.prepare` is called before or after.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from clipwise.engine.make_private import make_private as _make_private
from clipwise.errors import ConfigurationError
from clipwise.integrations.data_loader import arguments_of
from clipwise.integrations.mean_loss import MeanLossLoader


def make_private(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: Any, data_loader: Any, **options: Any
) -> MeanLossLoader:
    """Make a training loop with `accelerator.backward(loss)` private.

    Args:
        accelerator: of one process, without gradient accumulation and loss scaling.
        model: the model, prepared or not.
        optimizer: the optimizer, prepared or not.
        data_loader: a `DataLoader` that is not prepared: its data set, batch size and workers are used.
        options: further arguments of `clipwise.make_private`, such as epsilon and delta. `max_physical_batch_size`
            yields pieces.

    Returns:
        The loader of the loop. Its attribute `private` is the run.
    """
    if accelerator.num_processes > 1:
        raise ConfigurationError(
            "accelerate runs several processes. A private run in several processes is not supported: each would draw "
            "and count its own batches. Start one process."
        )
    if accelerator.gradient_accumulation_steps > 1:
        raise ConfigurationError(
            "Accelerator(gradient_accumulation_steps=...) would add up several releases: give the DataLoader a larger "
            "batch_size, and max_physical_batch_size to fit it into memory."
        )
    if accelerator.mixed_precision == "fp16" or accelerator.scaler is not None:
        raise ConfigurationError(
            "Accelerator(mixed_precision='fp16') scales the losses, which changes what is clipped: use 'bf16' or 'no'."
        )
    model.to(accelerator.device)
    pieces = options.pop("max_physical_batch_size", None)
    arguments = {**arguments_of(data_loader), **options}
    inner = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    private = _make_private(accelerator.unwrap_model(model), inner, arguments.pop("dataset"), **arguments)
    return MeanLossLoader(private, max_physical_batch_size=pieces, device=accelerator.device)
