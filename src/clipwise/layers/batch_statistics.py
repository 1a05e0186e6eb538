"""Batch norm layers that store no running statistics of private batches, and the exchange of layers of a model.

A strategy that clips whole microbatches (`Batch`) may use batch statistics in the forward pass. Running statistics
would release private data without noise, so these layers keep none. Evaluation uses the statistics of the evaluated
batch, of public data, or statistics released with noise.

The statistics of a layer's input, per row, can be attached to the autograd graph of the losses (`Observation`), and are
freed with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.modules.batchnorm import _BatchNorm

from clipwise.errors import ConfigurationError, UnsupportedModelError
from clipwise.gradients.walk import graph_nodes
from clipwise.validation.arguments import naming, require_module


def exchange_modules(model: nn.Module, others: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Replace every occurrence of the old modules, in place. Returns the model, or its replacement."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in others:
                parent._modules[name] = others[child]
    return others.get(model, model)


class BatchStatisticsNorm(_BatchNorm):
    """Batch norm that uses the statistics of the current batch and does not store them.

    `state_dict` has the keys of any batch norm layer. No forward pass changes `running_mean` and `running_var`. They
    are set by `recompute_statistics`, from public data, and by `clipwise.NoisedStatistics`, from noised releases;
    `num_batches_tracked` counts those public batches or releases. While it is 0, evaluation uses batch statistics too.

    A batch with a single value per channel, which Poisson subsampling can produce, is normalized to the bias.

    Attributes:
        is_observed: whether the output's graph carries input statistics in training (layers/batch_statistics.py).
        has_statistics: whether evaluation has public or released statistics. Equivalent to `num_batches_tracked` > 0,
            but readable without a tensor access, so that the forward pass can be exported.
    """

    is_observed: bool = False
    has_statistics: bool = False
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, num_features: int, eps: float = 1e-5, affine: bool = True, **options: Any) -> None:
        super().__init__(num_features, eps, momentum=None, affine=affine, track_running_stats=True, **options)
        self._collector: _Collector | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the batch. No buffer changes."""
        self._check_input_dim(input)
        if self._collector is not None:
            self._collector.add(input)
        elif not self.training and self.has_statistics:
            return self._by_running_statistics(input)
        if input.numel() == self.num_features:
            normalized = input - input  # keeps the graph; the gradient is 0, as for the statistics of one value
            if self.affine:
                shape = [1, -1] + [1] * (input.dim() - 2)
                normalized = normalized * self.weight.view(shape) + self.bias.view(shape)
        else:
            normalized = F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)
        return self._seen(normalized, input)

    def _by_running_statistics(self, input: Tensor) -> Tensor:
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)

    def _seen(self, normalized: Tensor, input: Tensor) -> Tensor:
        """The output; if `is_observed`, in training, with the input statistics on its graph."""
        return observed(normalized, self, input) if self.training and self.is_observed else normalized

    def reset_running_stats(self) -> None:
        super().reset_running_stats()
        self.has_statistics = False

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self.has_statistics = not self.num_batches_tracked.is_meta and int(self.num_batches_tracked) > 0

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, affine={self.affine}"

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"{type(self).__name__} takes inputs of shape [B, {self.num_features}, ...], with the channels second."
            )


class ReleasedStatisticsNorm(BatchStatisticsNorm):
    """Batch norm with released statistics, in training and in evaluation.

    The statistics are constants of a forward pass, so an example's output depends on no other example and the layer
    works with per-example clipping. `PerExample(..., running_statistics=NoisedStatistics())` updates them after each
    release. No gradient flows through them, and they lag one step behind the weights.

    Guarantee:
        - Sensitivity: C under zero-out, 2 C under replace-one, as for per-example clipping, because an example's output
          depends on no other example of the batch.
        - The buffers are functions of releases and of public data.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize each row with the released statistics (with batch statistics in `recompute_statistics`)."""
        if self._collector is not None:
            return super().forward(input)
        self._check_input_dim(input)
        return self._seen(self._by_running_statistics(input), input)


def without_running_statistics(model: nn.Module) -> nn.Module:
    """Replace every batch norm layer by a `BatchStatisticsNorm` with the same parameters. Returns the model.

    Frozen layers (in `.eval()` with statistics) are kept. Parameters keep their identity, so an optimizer that holds
    them stays valid. The names in `state_dict` stay the same.

    Args:
        model: changed in place, unless it is a batch norm layer itself.
    """
    return _replaced(model, BatchStatisticsNorm)


def with_released_statistics(model: nn.Module) -> nn.Module:
    """`without_running_statistics` for per-example clipping, with `ReleasedStatisticsNorm`. Returns the model.

    The statistics start at mean 0 and variance 1, or at those of public data if `recompute_statistics` is called.
    """
    return _replaced(model, ReleasedStatisticsNorm)


def _replaced(model: nn.Module, kind: type[BatchStatisticsNorm]) -> nn.Module:
    require_module(model)
    return exchange_modules(model, {m: _replacement(m, kind) for m in model.modules() if _is_to_replace(m)})


def recompute_statistics(
    model: nn.Module, public_batches: Iterable[Any], forward: Callable[[nn.Module, Any], Any] | None = None
) -> nn.Module:
    """Set the statistics used in evaluation from public data. Returns the model, in `.eval()`.

    In this pass every layer uses batch statistics, as in training; dropout is off. The mean and the (unbiased) variance
    per channel are taken over all values of all batches.

    Args:
        model: its batch norm layers must be those of `without_running_statistics`.
        public_batches: batches of public data in the form that the model takes; the first member of a list or tuple is
            the input. They should be about as large as the training batches. Never give private data: the statistics
            are released with the model.
        forward: `forward(model, batch)`; `model(input)` by default.
    """
    require_module(model)
    for name, module in model.named_modules():
        if _is_to_replace(module):
            raise UnsupportedModelError(
                f"Layer {name!r} ({type(module).__name__}) is an ordinary batch norm layer: call "
                "clipwise.layers.without_running_statistics(model) first, before training."
            )
    layers = {name: m for name, m in model.named_modules() if isinstance(m, BatchStatisticsNorm)}
    collectors = {layer: _Collector(layer.num_features) for layer in layers.values()}
    model.eval()
    batches = 0
    try:
        for layer, collector in collectors.items():
            layer._collector = collector
        for batch in public_batches:
            with torch.no_grad(), naming("public_batches"):
                if forward is None:
                    model(batch[0] if isinstance(batch, (list, tuple)) else batch)
                else:
                    forward(model, batch)
            batches += 1
    finally:
        for layer in collectors:
            layer._collector = None
    for name, layer in layers.items():  # validate before any layer changes
        found = collectors[layer]
        if found.count < 2:
            raise ConfigurationError(
                f"public_batches holds fewer than two values for the batch norm layer {name!r}: give more public data, "
                "and a forward that uses every layer."
            )
        if not bool(torch.isfinite(found.mean_C).all() & torch.isfinite(found.square_C).all()):
            raise ConfigurationError(
                f"public_batches gives the batch norm layer {name!r} values that are not finite: leave those rows out."
            )
    for layer, found in collectors.items():
        layer.running_mean.copy_(found.mean_C)
        layer.running_var.copy_(found.square_C / (found.count - 1))
        layer.num_batches_tracked.fill_(batches)
        layer.has_statistics = True
    return model


class _Collector:
    """Running mean and sum of squared deviations per channel, in float64."""

    def __init__(self, channels: int) -> None:
        self.count = 0
        self.mean_C = torch.zeros(channels, dtype=torch.float64)
        self.square_C = torch.zeros(channels, dtype=torch.float64)  # squared deviations from the mean

    def add(self, values: Tensor) -> None:
        """The parallel variance update of Chan, Golub and LeVeque, which avoids cancellation."""
        rows = values.detach().transpose(0, 1).flatten(1).double()
        new = rows.shape[1]
        if new == 0:
            return
        mean_C = rows.mean(1)
        square_C = (rows - mean_C[:, None]).square().sum(1)
        total = self.count + new
        step_C = mean_C - self.mean_C.to(mean_C)
        self.square_C = self.square_C.to(mean_C) + square_C + step_C.square() * (self.count * new / total)
        self.mean_C = self.mean_C.to(mean_C) + step_C * (new / total)
        self.count = total


def _is_to_replace(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """A batch norm layer that updates its statistics, or that uses batch statistics in evaluation."""
    is_ordinary = isinstance(module, _BatchNorm) and not isinstance(module, BatchStatisticsNorm)
    return is_ordinary and (module.training or module.running_mean is None)


def _replacement(module: _BatchNorm, kind: type[BatchStatisticsNorm]) -> BatchStatisticsNorm:
    if isinstance(module, nn.SyncBatchNorm):
        raise UnsupportedModelError(
            "SyncBatchNorm shares statistics between processes, and so between microbatches: use BatchNorm layers."
        )
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        raise UnsupportedModelError(
            f"{type(module).__name__} is not initialized yet: run the model once on public or synthetic rows first."
        )
    new = kind(module.num_features, module.eps, affine=False)
    like = module.weight if module.weight is not None else next(iter(module.buffers()), None)
    if like is not None:
        new.to(device=like.device, dtype=like.dtype)
    new.affine, new.weight, new.bias = module.affine, module.weight, module.bias
    new.training = module.training
    return new


@dataclass(frozen=True)
class Observation:
    """Shape and dtype of a layer's output [B, C, ...]; mean and (biased) variance of its input over positions."""

    layer: nn.Module
    shape: torch.Size
    dtype: torch.dtype
    mean_BC: Tensor
    var_BC: Tensor

    @property
    def positions(self) -> int:
        return math.prod(self.shape[2:])


def observed(output: Tensor, layer: nn.Module, input: Tensor) -> Tensor:
    """The output unchanged, with an `Observation` of the input ([B, C, ...]) on its graph node."""
    values = input.detach()
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()
    if values.numel():
        var_BC, mean_BC = torch.var_mean(values.reshape(*values.shape[:2], -1), 2, correction=0)
    else:  # torch would warn, and whether a batch is empty is secret
        var_BC = mean_BC = values.new_zeros(values.shape[:2])
    seen = Observation(layer, output.shape, output.dtype, mean_BC, var_BC)
    # The anchor requires a gradient, so a node exists even if nothing before the layer is trained.
    result: Tensor = _Carry.apply(output, torch.zeros((), requires_grad=True), seen)  # type: ignore[no-untyped-call]
    return result


def observations(losses: Tensor) -> Iterator[tuple[Observation, GradientEdge]]:
    """Every observation in the graph of the losses, with the edge of the layer's output."""
    for node in graph_nodes(losses.grad_fn):
        seen = getattr(node, "seen", None)
        if isinstance(seen, Observation):
            yield seen, GradientEdge(node, 0)


class _Carry(torch.autograd.Function):
    """The identity; its node carries an observation."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, seen: Observation) -> Tensor:
        ctx.seen = seen
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None
