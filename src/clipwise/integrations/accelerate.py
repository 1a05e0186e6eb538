"""Private training in a loop that uses `accelerate.Accelerator`, in one process or several.

`accelerator.backward(loss)`, `optimizer.step()` and `optimizer.zero_grad()` of the loop stay as they are. It does not
matter whether `accelerator.prepare` is called before or after.

Several processes draw one batch together, and each takes its own records of it. Every process runs the body of the loop
for every batch or piece, also where it has no record, so the broadcasts of DistributedDataParallel match.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor

from clipwise.engine.make_private import make_private as _make_private
from clipwise.errors import ConfigurationError
from clipwise.integrations.data_loader import arguments_of, with_options
from clipwise.integrations.mean_loss import MeanLossLoader


def make_private(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: Any, data_loader: Any, **options: Any
) -> MeanLossLoader:
    """Make a training loop with `accelerator.backward(loss)` private.

    Args:
        accelerator: of one process or several with data parallelism, without gradient accumulation and loss scaling.
        model: the model, prepared or not.
        optimizer: the optimizer, prepared or not.
        data_loader: a `DataLoader` that is not prepared: its data set, batch size and workers are used. As in
            accelerate, its batch size is that of one process, unless `split_batches` is set.
        options: further arguments of `clipwise.make_private`, such as epsilon and delta. `max_physical_batch_size`
            yields pieces.

    Returns:
        The loader of the loop. Its attribute `private` is the run.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise ConfigurationError(
            f"accelerate was configured with {kind}, which is not supported: configure data parallelism ('accelerate "
            "launch --multi_gpu'). For a sharded model use clipwise.make_private with "
            "torch.distributed.fsdp.fully_shard in a loop of your own."
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
    if isinstance(data_loader, (DataLoaderShard, DataLoaderDispatcher)):
        raise ConfigurationError(
            "The data loader is prepared, so accelerate would divide its batches among the processes. Give the "
            "DataLoader itself, and leave it out of accelerator.prepare: the private run draws the batches and moves "
            "them to the device."
        )
    model.to(accelerator.device)
    pieces = options.pop("max_physical_batch_size", None)
    arguments = arguments_of(data_loader)
    if not accelerator.split_batches:
        arguments["batch_size"] = min(arguments["batch_size"] * accelerator.num_processes, len(arguments["dataset"]))
    arguments = with_options(arguments, options)
    inner = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    private = _make_private(accelerator.unwrap_model(model), inner, arguments.pop("dataset"), **arguments)
    trained = frozenset(map(id, model.parameters()))
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        setattr(accelerator, name, partial(_clip, getattr(accelerator, name), name, trained))
    accelerator.skip_first_batches = partial(_skip, accelerator.skip_first_batches)
    return MeanLossLoader(private, max_physical_batch_size=pieces, device=accelerator.device)


def _clip(
    clip: Callable[..., Any], name: str, trained: frozenset[int], parameters: Any, *args: Any, **options: Any
) -> Any:
    """A method of the accelerator that clips gradients, for parameters that no private run trains."""
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not trained.isdisjoint(map(id, parameters)):
        raise ConfigurationError(
            f"accelerator.{name} would clip the noised mean of the private run, not the gradient of each record, so it "
            "bounds no record: remove it. clipping=PerExample(max_norm=...) bounds each record."
        )
    return clip(parameters, *args, **options)


def _skip(skip: Callable[..., Any], data_loader: Any, *args: Any, **options: Any) -> Any:
    """`skip_first_batches` of the accelerator, for loaders of other data."""
    if isinstance(data_loader, MeanLossLoader):
        raise ConfigurationError(
            "accelerator.skip_first_batches: the loader of a private run continues by itself with the first batch that "
            "is not released yet. Iterate over it directly."
        )
    return skip(data_loader, *args, **options)
