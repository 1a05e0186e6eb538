"""Running statistics of batch norm layers, learned from noised releases and from nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.clipping.base import Bound, Site
from clipwise.errors import ConfigurationError, StepError, UnsupportedModelError
from clipwise.layers.batch_observations import Observation, observations
from clipwise.layers.batch_statistics import BatchStatisticsNorm, ReleasedStatisticsNorm
from clipwise.validation.arguments import number, with_plain_numbers

STATISTICS_OF = "statistics of "  # the name of a layer's part begins so
_AIM = 1 - 2.0**-20  # times R: norms and sums in float64 stay well within what is left
_LARGEST = 1e30  # of a variance: float32 holds it


@dataclass(frozen=True)
class NoisedStatistics:
    """Running statistics as parts of each release: option `running_statistics` of `Batch` and of `PerExample`.

    With `Batch`, layers of `layers.without_running_statistics(model)` use the statistics of the mini-set at hand in
    training, and for evaluation a mean mu and a variance v that are learned here. With `PerExample`, layers of
    `layers.with_released_statistics(model)` use the released mu and v in training too.

    The release for a layer with c channels is the deviation from mu and v, in units of r = (v + eps)^(-1/2):

        u = (m - mu) r,    w = (max(q, eps) + eps) r^2 - 1,    m = mean of a,  q = mean of (a - mu)^2

    in R^(2c), every entry kept within [-1, 1], the whole clipped to norm R; over the values of a mini-set, or of an
    example. Sums of such vectors get noise and are divided by a constant, as the gradient is. From the result the layer
    learns

        mu <- mu + p u / r,    log(v + eps) <- log(v + eps) + p w,    v >= eps,    p = momentum

    so absent records change nothing, and R counts in standard deviations, whatever the scale of a layer. mu and v
    begin at what the layer's buffers hold: 0 and 1, or those of public data (`layers.recompute_statistics`).

    The buffers `running_mean` and `running_var` change once a release; `num_batches_tracked` counts releases. They
    are saved with the model. Layers in `.eval()` when the run is made stay as they are.

    Args:
        max_norm: R. But for the noise a layer moves by p R in a step at most. Noise is proportional to R, and steps are
            many: prefer a small R and a large p to the reverse.
        momentum: p, above 0 and at most 1.
        share: of the privacy of a step, how much the statistics of all layers take together. With z the noise
            multiplier of the step, the gradient has z / sqrt(1 - share), and the statistics z / sqrt(share), which
            they divide among themselves by `split` and their sizes 2c ("optimal" if that gives weights).

    Guarantee:
        Adjacency and unit: those of the strategy. All parts of a step come from one sample and are one Gaussian
        mechanism with the gradient. What the layers learn, and how mu and v enter the next release, is
        post-processing.
        Sensitivity of a layer's part under `Batch`: 2 R for a record, under zero-out and replace-one, because a record
        can turn the vector of its mini-set round, through every layer before; it moves no other mini-set. If
        the unit is the mini-set itself (a user), R under zero-out. No bound on activations is assumed, nor that
        rows are independent: the clip is of the whole vector.
        Under `PerExample`: R under zero-out, 2 R under replace-one. Assumption: the rows that a layer gets are one an
        example, in the order of the losses, and follow from their own example only; the first is checked in
        every step, the second by a probe on the first batches, which is a lint and no proof. (The last digits of
        activations may depend on the size of the batch, as those of losses may; u and w magnify them by less than
        3 eps^(-1/2).)
        A vector that is not finite counts as 0. Norms and sums run in float64, and vectors are clipped to
        (1 - 2^-20) R, so that rounding does not pass R.
    """

    max_norm: float = 0.5
    momentum: float = 0.5
    share: float = 0.1

    def __post_init__(self) -> None:
        with_plain_numbers(self)
        for name, value in asdict(self).items():
            number(f"NoisedStatistics: {name}", value, above=0)
        if self.momentum > 1:
            raise ConfigurationError(f"NoisedStatistics: momentum={self.momentum!r} must be at most 1.")
        if self.share >= 1:
            raise ConfigurationError(f"NoisedStatistics: share={self.share!r} must be below 1.")

    def describe(self) -> dict[str, Any]:
        return {name: float(value) for name, value in asdict(self).items()}


class LayerStatistics:
    """`NoisedStatistics` for the layers of one model. Without a rule there are none.

    Attributes:
        bounds: a part for each layer, where a unit moves it by at most `factor` times R.
    """

    def __init__(
        self, rule: NoisedStatistics | None = None, site: Site | None = None, factor: float = 2.0
    ) -> None:
        self._layers: dict[str, BatchStatisticsNorm] = {}
        self.bounds: tuple[Bound, ...] = ()
        if rule is None or site is None:
            if site is not None:
                _require_settled(site.model)
            return
        self._rule = rule
        for name, layer in site.model.named_modules():
            if isinstance(layer, BatchStatisticsNorm) and layer.training:
                layer.is_observed = True
                self._layers[part_name(name)] = layer
        if not self._layers:
            raise ConfigurationError(
                "running_statistics=NoisedStatistics(...) finds no layer to learn them for. Before make_private call "
                "clipwise.layers.without_running_statistics(model) for Batch, or with_released_statistics(model) for "
                "PerExample, and model.train()."
            )
        for name in self._layers:
            if name in site.parameters:
                raise ConfigurationError(
                    f"running_statistics=NoisedStatistics(...) needs the name {name!r}: rename that parameter."
                )
        self.bounds = tuple(
            Bound(name, (), factor * rule.max_norm, size=2 * layer.num_features, share=rule.share)
            for name, layer in self._layers.items()
        )

    def clipped(self, losses: Tensor) -> dict[str, Tensor]:
        """[(u, w)]_R of each layer, as one mini-set showed them on the way to its losses. In float64."""
        return {
            name: clipped_sum(_of_mini_set(layer, seen)[None], self._rule.max_norm)
            for name, layer, seen in self._seen(losses)
        }

    def clipped_by_row(self, losses: Tensor) -> dict[str, Tensor]:
        """sum_i [(u_i, w_i)]_R of each layer, over the rows of a batch, one an example. In float64."""
        found = {}
        for name, layer, seen in self._seen(losses):
            if any(len(one.mean_BC) != len(losses) for one in seen):
                raise UnsupportedModelError(
                    f"The layer of {name!r} does not get one row an example, so what an example adds to its "
                    "statistics cannot be told apart. Let it have inputs of shape [B, C, ...], and use no "
                    "averaged_views."
                )
            found[name] = clipped_sum(_of_rows(layer, seen), self._rule.max_norm)
        return found

    def _seen(self, losses: Tensor) -> Iterator[tuple[str, BatchStatisticsNorm, list[Observation]]]:
        """What each layer saw on the way to the losses."""
        if not self._layers:
            return
        seen: dict[nn.Module, list[Observation]] = {}
        for one, _ in observations(losses):
            seen.setdefault(one.layer, []).append(one)
        for name, layer in self._layers.items():
            if not layer.training:
                raise StepError(
                    f"The layer of {name!r} is in .eval(), so it shows no statistics to learn from: call model.train() "
                    "after an evaluation."
                )
            if layer not in seen:
                raise UnsupportedModelError(
                    f"The layer of {name!r} takes no part in the losses, as far as their graph shows, so its released "
                    "statistics would be pure noise. Use it in the forward pass, without torch.compile, or freeze it "
                    "with .eval() before make_private."
                )
            yield name, layer, seen[layer]

    def nothing(self) -> dict[str, Tensor]:
        """What an empty mini-set adds."""
        return {
            name: torch.zeros(2 * m.num_features, dtype=torch.float64, device=_buffers(m)[0].device)
            for name, m in self._layers.items()
        }

    @torch.no_grad()
    def learn(self, means: Mapping[str, Tensor]) -> None:
        """Move the layers' buffers by what was released: the noised mean of (u, w) over mini-sets."""
        for name, layer in self._layers.items():
            mean_C, var_C = _moments(layer)
            # Post-processing, so that noise of any size does no more than a bad step.
            step = (self._rule.momentum * means[name].to(mean_C)).nan_to_num().clamp(-1, 1)
            u_C, w_C = step.chunk(2)
            spread_C = var_C + layer.eps
            running_mean, running_var = _buffers(layer)
            running_mean.copy_(mean_C + u_C * spread_C.sqrt())
            running_var.copy_((spread_C * w_C.exp() - layer.eps).clamp(layer.eps, _LARGEST))
            assert layer.num_batches_tracked is not None
            layer.num_batches_tracked += 1
            layer.has_statistics = True


def _require_settled(model: nn.Module) -> None:
    """Refuse layers that wait for releases which never come: they would normalize by mean 0 and variance 1."""
    for name, layer in model.named_modules():
        if isinstance(layer, ReleasedStatisticsNorm) and not layer.has_statistics:
            raise ConfigurationError(
                f"Layer {name!r} ({type(layer).__name__}) has no statistics, and nothing would learn them: give "
                "running_statistics=NoisedStatistics(), or set them from public data with "
                "clipwise.layers.recompute_statistics(model, public_batches)."
            )


def part_name(layer: str) -> str:
    """How messages and the statement call the part of a layer."""
    return f"{STATISTICS_OF}{layer or 'the model'}"


def _of_mini_set(layer: BatchStatisticsNorm, seen: list[Observation]) -> Tensor:
    """(u, w) [2c] of all rows together, over all passes through the layer: every value counts once."""
    count = max(1, sum(len(one.mean_BC) * one.positions for one in seen))
    sums = [[x_BC.sum(0) * one.positions for x_BC in _about_mean(layer, one)] for one in seen]
    return _deviation(layer, sums, count)


def _of_rows(layer: BatchStatisticsNorm, seen: list[Observation]) -> Tensor:
    """(u_i, w_i) [B, 2c] of each row, over all passes through the layer: every value counts once."""
    sums = [[x_BC * one.positions for x_BC in _about_mean(layer, one)] for one in seen]
    return _deviation(layer, sums, max(1, sum(one.positions for one in seen)))


def _about_mean(layer: BatchStatisticsNorm, one: Observation) -> tuple[Tensor, Tensor]:
    """m - mu and q of each row, in float64."""
    mean_C, _ = _moments(layer)
    apart_BC = one.mean_BC.to(mean_C) - mean_C
    return apart_BC, one.var_BC.to(mean_C) + apart_BC.square()


def _deviation(layer: BatchStatisticsNorm, sums: list[list[Tensor]], count: int) -> Tensor:
    """(u, w) from sums of m - mu and q over passes, each entry within [-1, 1]; NaN stays NaN."""
    apart, square = (torch.stack(x).sum(0) / count for x in zip(*sums, strict=True))
    spread_C = _moments(layer)[1] + layer.eps
    w = (square.clamp(min=layer.eps) + layer.eps) / spread_C - 1
    return torch.cat([apart / spread_C.sqrt(), w], -1).clamp(-1, 1)


def clipped_sum(vectors_N: Tensor, bound: float) -> Tensor:
    """sum_i min(1, R / |v_i|) v_i, each a little below R; 0 for a v_i that is not finite."""
    norms_N1 = torch.linalg.vector_norm(vectors_N, dim=1, keepdim=True)
    weights_N1 = (bound * _AIM / norms_N1).clamp(max=1)  # R / 0 is inf, and clamps to 1
    return torch.where(norms_N1.isfinite(), vectors_N * weights_N1, 0).sum(0)


def _buffers(layer: BatchStatisticsNorm) -> tuple[Tensor, Tensor]:
    assert layer.running_mean is not None and layer.running_var is not None
    return layer.running_mean, layer.running_var


def _moments(layer: BatchStatisticsNorm) -> tuple[Tensor, Tensor]:
    """mu and v, in float64."""
    mean_C, var_C = _buffers(layer)
    return mean_C.double(), var_C.double()
