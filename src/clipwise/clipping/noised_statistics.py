"""Running statistics of batch norm layers, learned from noised releases only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.clipping.base import Bound, Site
from clipwise.errors import ConfigurationError, StepError, UnsupportedModelError
from clipwise.layers.batch_statistics import BatchStatisticsNorm, Observation, ReleasedStatisticsNorm, observations
from clipwise.validation.arguments import number, with_plain_numbers

STATISTICS_OF = "statistics of "  # prefix of the part names
_AIM = 1 - 2.0**-20  # times R: the margin covers the rounding of norms and sums in float64
_LARGEST = 1e30  # of a variance: float32 holds it


@dataclass(frozen=True)
class NoisedStatistics:
    """Running statistics as parts of each release: option `running_statistics` of `Batch` and of `PerExample`.

    With `Batch`, the layers of `layers.without_running_statistics(model)` normalize by the current microbatch in
    training, and by a learned mean mu and variance v in evaluation. With `PerExample`, the layers of
    `layers.with_released_statistics(model)` use the released mu and v in training too.

    The release for a layer with c channels is the deviation from mu and v, scaled by r = (v + eps)^(-1/2):

        u = (m - mu) r,    w = (max(q, eps) + eps) r^2 - 1,    m = mean of a,  q = mean of (a - mu)^2

    over the values a of a microbatch or of an example. The vector (u, w) in R^(2c) is clamped to [-1, 1] and then
    clipped to norm R. Like the gradient, the sum of these vectors gets noise and is divided by a constant. The layer
    then updates

        mu <- mu + p u / r,    log(v + eps) <- log(v + eps) + p w,    v >= eps,    p = momentum

    so R is in units of standard deviations. mu and v start at the values of the layer's buffers: 0 and 1, or those of
    public data (`layers.recompute_statistics`). Layers that are in `.eval()` mode at `make_private` do not change.

    Args:
        max_norm: R. Without noise, mu and v change by at most p R per step. The noise is proportional to R: prefer a
            small R and a large p.
        momentum: p, above 0 and at most 1.
        share: the fraction of the privacy of a step used by the statistics of all layers together. With noise
            multiplier z, the gradient has z / sqrt(1 - share) and the statistics z / sqrt(share), divided over the
            layers by `split` and their sizes 2c ("optimal" if `split` is a mapping).

    Guarantee:
        - Adjacency and unit: those of the strategy. All parts use the same batch and are one Gaussian mechanism with
          the gradient. The updates of the layers are post-processing.
        - Sensitivity of a layer's part with `Batch`: 2 R for a record, under zero-out and replace-one, because one
          record can reverse the vector of its microbatch. It changes no other microbatch. If the unit is a user: R
          under zero-out. Activations need not be bounded, nor rows independent.
        - Sensitivity with `PerExample`: R under zero-out, 2 R under replace-one. Assumption: each layer gets one row
          per example, in the order of the losses (checked in every step), and each row depends on its own example only
          (probed on the first batches, not proven). Rounding of activations may depend on the batch size, as that of
          losses; u and w amplify it by less than 3 eps^(-1/2).
        - A vector that is not finite is replaced by 0. Norms and sums use float64, and vectors are clipped to
          (1 - 2^-20) R, so that norms stay below R after rounding.
    """

    max_norm: float = 0.5
    momentum: float = 0.5
    share: float = 0.1

    def __post_init__(self) -> None:
        with_plain_numbers(self)
        number("NoisedStatistics: max_norm", self.max_norm, above=0)
        number("NoisedStatistics: momentum", self.momentum, above=0, most=1)
        number("NoisedStatistics: share", self.share, above=0, below=1)

    def describe(self) -> dict[str, Any]:
        return {name: float(value) for name, value in asdict(self).items()}


class LayerStatistics:
    """`NoisedStatistics` for the layers of one model; no layers if `rule` is None."""

    def __init__(self, rule: NoisedStatistics | None, site: Site, factor: float) -> None:
        self._layers: dict[str, BatchStatisticsNorm] = {}
        self.bounds: tuple[Bound, ...] = ()  # one part per layer, with sensitivity `factor` times R
        for name, layer in site.model.named_modules():
            if rule is None and isinstance(layer, ReleasedStatisticsNorm) and not layer.has_statistics:
                raise ConfigurationError(  # it would normalize by mean 0 and variance 1 forever
                    f"Layer {name!r} ({type(layer).__name__}) has no statistics, and none would be released: pass "
                    "running_statistics=NoisedStatistics(), or set them from public data with "
                    "clipwise.layers.recompute_statistics(model, public_batches)."
                )
            if rule is not None and isinstance(layer, BatchStatisticsNorm) and layer.training:
                layer.is_observed = True
                self._layers[f"{STATISTICS_OF}{name or 'the model'}"] = layer
        if rule is None:
            return
        self._rule = rule
        if not self._layers:
            raise ConfigurationError(
                "running_statistics=NoisedStatistics(...) found no layer whose statistics it could release. "
                "Before make_private call clipwise.layers.without_running_statistics(model) for Batch, or "
                "with_released_statistics(model) for PerExample, and model.train()."
            )
        self.bounds = tuple(
            Bound(name, (), factor * rule.max_norm, size=2 * layer.num_features, share=rule.share)
            for name, layer in self._layers.items()
        )

    def clipped(self, losses: Tensor, by_row: bool) -> dict[str, Tensor]:
        """Of each layer in float64: sum_i [(u_i, w_i)]_R over the rows, or [(u, w)]_R of the whole microbatch."""
        found: dict[str, Tensor] = {}
        if not self._layers:
            return found
        seen: dict[nn.Module, list[Observation]] = {}
        for one, _ in observations(losses):
            seen.setdefault(one.layer, []).append(one)
        for name, layer in self._layers.items():
            if not layer.training:
                raise StepError(
                    f"The layer of {name!r} is in .eval() mode, so it observes no statistics: call model.train() after "
                    "an evaluation."
                )
            if layer not in seen:
                raise UnsupportedModelError(
                    f"The layer of {name!r} is not in the graph of the losses, so its released statistics would be "
                    "pure noise. Use it in the forward pass, without torch.compile, or freeze it with .eval() before "
                    "make_private."
                )
            if by_row and any(len(one.mean_BC) != len(losses) for one in seen[layer]):
                raise UnsupportedModelError(
                    f"The layer of {name!r} does not get one row per example, so its statistics cannot be clipped per "
                    "example. Use inputs of shape [B, C, ...], and do not use augmentation_multiplicity."
                )
            found[name] = clipped_sum(_deviations(layer, seen[layer], by_row), self._rule.max_norm)
        return found

    def nothing(self) -> dict[str, Tensor]:
        """The contribution of an empty microbatch: zeros."""
        return {
            name: torch.zeros(2 * m.num_features, dtype=torch.float64, device=m.running_mean.device)
            for name, m in self._layers.items()
        }

    @torch.no_grad()
    def learn(self, means: Mapping[str, Tensor]) -> None:
        """Update the layers' buffers from the release: the noised mean of (u, w)."""
        for name, layer in self._layers.items():
            mean_C, var_C = _moments(layer)
            # Post-processing: clamp, so that large noise causes no more than one bad step.
            step = (self._rule.momentum * means[name].to(mean_C)).nan_to_num().clamp(-1, 1)
            u_C, w_C = step.chunk(2)
            spread_C = var_C + layer.eps
            layer.running_mean.copy_(mean_C + u_C * spread_C.sqrt())
            layer.running_var.copy_((spread_C * w_C.exp() - layer.eps).clamp(layer.eps, _LARGEST))
            layer.num_batches_tracked += 1
            layer.has_statistics = True


def _deviations(layer: BatchStatisticsNorm, seen: list[Observation], by_row: bool) -> Tensor:
    """(u_i, w_i) [B, 2c] of each row, or (u, w) [1, 2c] of all, over all calls of the layer, clamped to [-1, 1].

    Every value has equal weight. NaN stays NaN.
    """
    mean_C, var_C = _moments(layer)
    sums, count = [], 0
    for one in seen:
        apart_BC = one.mean_BC.to(mean_C) - mean_C
        both = apart_BC, one.var_BC.to(mean_C) + apart_BC.square()  # m - mu and q
        sums.append([(x_BC if by_row else x_BC.sum(0, keepdim=True)) * one.positions for x_BC in both])
        count += one.positions * (1 if by_row else len(apart_BC))
    apart, square = (torch.stack(x).sum(0) / max(1, count) for x in zip(*sums, strict=True))
    spread_C = var_C + layer.eps
    w = (square.clamp(min=layer.eps) + layer.eps) / spread_C - 1
    return torch.cat([apart / spread_C.sqrt(), w], -1).clamp(-1, 1)


def clipped_sum(vectors_N: Tensor, bound: float) -> Tensor:
    """sum_i min(1, R / |v_i|) v_i, each a little below R; 0 for a v_i that is not finite."""
    norms_N1 = torch.linalg.vector_norm(vectors_N, dim=1, keepdim=True)
    weights_N1 = (bound * _AIM / norms_N1).clamp(max=1)  # R / 0 is inf, and clamps to 1
    return torch.where(norms_N1.isfinite(), vectors_N * weights_N1, 0).sum(0)


def _moments(layer: BatchStatisticsNorm) -> tuple[Tensor, Tensor]:
    """mu and v, in float64."""
    return layer.running_mean.double(), layer.running_var.double()
