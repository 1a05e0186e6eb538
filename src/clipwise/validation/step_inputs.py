"""Checks of the model of a run: its parameters and its layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from clipwise.errors import ConfigurationError, UnsupportedModelError
from clipwise.layers.batch_statistics import BatchStatisticsNorm, ReleasedStatisticsNorm
from clipwise.validation.coupling import USE_BATCH


def trainable_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Return the trainable parameters. Raise if the model and the optimizer do not hold the same ones."""
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}.")
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
