"""Checks of the inputs of a step: parameters, layers, losses and batches. No message holds a data value."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from clipwise.errors import ConfigurationError, StepError, UnsupportedModelError
from clipwise.layers.batch_statistics import BatchStatisticsNorm, ReleasedStatisticsNorm
from clipwise.sampling.batch_structure import tensors_in
from clipwise.validation.coupling import PAIRS, USE_BATCH
from clipwise.validation.marked import tracked


def trainable_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Return the trainable parameters. Raise if the model and the optimizer do not hold the same ones."""
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"optimizer must be one torch.optim.Optimizer, not {type(optimizer).__name__}. Parts of a model with "
            "settings of their own are groups of one optimizer: SGD([{'params': ..., 'lr': ...}, ...])."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            "optimizer is LBFGS, which needs several gradients of one batch per step: use SGD, Adam or another "
            "optimizer that needs one."
        )
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ConfigurationError("model has no trainable parameter: every requires_grad is False.")
    known = {id(p) for p in model.parameters()}
    held = set()
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if id(p) not in known:
                raise ConfigurationError(
                    f"optimizer holds a parameter of shape {tuple(p.shape)} (group {number}) that the model "
                    "does not: build the optimizer from this model's parameters, after all changes to it."
                )
            held.add(id(p))
    forgotten = [name for name, p in trainable.items() if id(p) not in held]
    if forgotten:
        raise ConfigurationError(
            f"Parameter {forgotten[0]!r} is trainable but the optimizer does not hold it: add it to the "
            "optimizer, or freeze it with requires_grad_(False)."
        )
    require_no_hooks(trainable)
    return trainable


def require_no_hooks(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise if parameters have hooks: they would read or change gradients before the noise."""
    for name, p in parameters.items():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ConfigurationError(
                f"Parameter {name!r} has a hook on its gradient (register_hook). It could read or change gradients "
                "before the noise. Remove it: apply momentum, weight decay and further clipping in the optimizer, or "
                "to .grad after private.backward."
            )


def require_real(parameters: Mapping[str, nn.Parameter], strategy: str) -> None:
    """Raise if a parameter is complex, for a strategy that supports real ones only."""
    for name, p in parameters.items():
        if p.is_complex():
            raise ConfigurationError(
                f"Parameter {name!r} is {p.dtype}, and clipping={strategy} is for real parameters. Keep it as pairs of "
                "real numbers and call torch.view_as_complex in forward, or use PerExample or Batch without sparse."
            )


_LEARNED = (
    "Statistics that it already computed from private data must not be published with the model: call "
    "reset_running_stats() on it, or load earlier statistics."
)


def require_no_batch_statistics(model: nn.Module, is_coupled: bool = False) -> None:
    """Raise if a layer keeps statistics of private data, or mixes examples without a bound.

    `is_coupled`: whole microbatches are clipped, which bounds the mixing.
    """
    for name, module in model.named_modules():
        require_no_statistics_in(name, module, is_coupled)


def require_no_statistics_in(name: str, module: nn.Module, is_coupled: bool = False) -> None:
    """Check a single layer as `require_no_batch_statistics` does."""
    layer = f"Layer {name!r} ({type(module).__name__})"
    if isinstance(module, ReleasedStatisticsNorm):
        return  # its statistics are computed from releases
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        has_none = module.running_mean is None
        if is_coupled:
            # The clip bounds the use of batch statistics, but not running statistics. A torch layer without running
            # statistics fails on a batch of one record, and its message shows the realised batch size.
            if isinstance(module, BatchStatisticsNorm) or not (module.training or has_none):
                return
            trouble = (
                "would fail on a microbatch of one record, which sampling may produce"
                if has_none
                else "would update running statistics from private data, and they would be published with the model "
                "without any noise"
            )
            raise UnsupportedModelError(
                f"{layer} {trouble}. Call clipwise.layers.without_running_statistics(model) before make_private: the "
                "layer then uses the statistics of each batch. For evaluation, Batch(..., "
                "running_statistics=NoisedStatistics()) estimates them from noised releases, and "
                "clipwise.layers.recompute_statistics(model, public_batches) sets them from public data."
            )
        if module.training:
            raise UnsupportedModelError(
                f"{layer} is in training mode: it mixes the examples of a batch, so one record changes every clipped "
                "gradient, and its running statistics leak. Replace it by GroupNorm, LayerNorm or a layer with public "
                "statistics (clipwise.layers.replace_batchnorm does), or freeze its statistics with .eval(). "
                f"{_LEARNED} {USE_BATCH}."
            )
        if has_none or (isinstance(module, BatchStatisticsNorm) and not module.has_statistics):
            raise UnsupportedModelError(
                f"{layer} keeps no running statistics, so it mixes the examples of a batch even in .eval(). Replace it "
                f"by GroupNorm or LayerNorm (clipwise.layers.replace_batchnorm does). {USE_BATCH}."
            )
    keeps = isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats
    if keeps and module.training:
        raise UnsupportedModelError(
            f"{layer} keeps running statistics of private data. Build it with track_running_stats=False, or freeze it "
            f"with .eval(). {_LEARNED}"
        )


def require_losses(losses: object, size: int, is_coupled: bool = False) -> Tensor:
    """Return losses that are one per example and carry a gradient, or raise. The batch size is secret: not in messages.

    With `is_coupled` (whole microbatches are clipped) a single number is accepted.
    """
    if not isinstance(losses, Tensor):
        raise StepError(f"losses must be a tensor with one loss per example, not {type(losses).__name__}.")
    if type(losses) is not Tensor:
        losses = tracked(losses)
    if is_coupled and size == 0 and (losses.dim() == 0 or losses.shape == (0,)):
        return torch.zeros(0)  # the loss of an empty microbatch is not used
    if losses.dim() == 0 and not is_coupled:
        raise StepError(
            "losses is a single number, so the examples cannot be separated. Give one loss per example: use "
            "reduction='none' and no mean or sum over the batch."
        )
    if losses.shape == (size, size) and size > 1:
        raise StepError(f"{PAIRS} If the second dimension counts positions instead, sum or average over it.")
    if losses.dim() > 1:
        raise StepError(
            f"losses has {losses.dim()} dimensions. Give one loss per example: first make sure that outputs and "
            "targets have the same shape, then sum or average over each example's positions, as in "
            "losses.flatten(1).sum(1)."
        )
    if losses.dim() == 1 and len(losses) != size:
        raise StepError(
            "losses does not have one entry for each example of the batch that private.loader returned. "
            "Do not drop, repeat or pool examples."
        )
    if not losses.is_floating_point():
        raise StepError(f"losses is {losses.dtype}: it must be real floating point.")
    if not losses.requires_grad:
        raise StepError(
            "losses carries no gradient: compute it from the model's output, with gradients enabled "
            "(no torch.no_grad, no .detach())."
        )
    return losses


def require_rows(batch: object, size: int) -> None:
    """Raise if a compiled step does not get the loader's last batch. The batch size is secret: not in messages."""
    rows = {len(t) for t in tensors_in(batch) if t.dim()}
    if rows != {size}:
        raise StepError(
            "step(*batch) takes the last batch of private.loader: tensors with a first dimension that counts its "
            "examples. Do not drop, repeat or pool examples, and add nothing else to it."
        )
