"""Per-example clipping."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clipwise.clipping.base import Clipper, Site, Split
from clipwise.clipping.contrib.sparse import Sparse, active_only
from clipwise.clipping.noised_statistics import LayerStatistics, NoisedStatistics
from clipwise.clipping.thresholds import Groups, MaxNorm, Policy
from clipwise.clipping.vector_clipping import VectorClipper, VectorClipping
from clipwise.deprecation import renamed_fields
from clipwise.errors import ConfigurationError, UnreachedParametersError, UnsupportedModelError
from clipwise.gradients import METHODS, Memory, PerExampleGradients, per_example_gradients
from clipwise.gradients.forms import at_least_float32
from clipwise.gradients.precision import IEEE, TF32, Arithmetic, chosen_arithmetic
from clipwise.gradients.real_views import own_part
from clipwise.layers.clipped.layer import trainable_clips
from clipwise.validation.arguments import one_of, with_plain_numbers

MODES = ("clip", "normalize")
MATMUL_PRECISIONS = ("auto", "ieee", "tf32")
_WRITTEN = ("instantiate", "vmap", "loop")  # methods that materialize per-example gradients
_NORMALIZE_FLOOR = 0.01  # gamma in C g / (|g| + gamma C): limits the growth of tiny gradients
_SMALLEST_WEIGHT = torch.finfo(torch.float32).tiny  # smaller weights have a relative rounding error above 2^-24


@renamed_fields(products="matmul_precision")
@dataclass(frozen=True)
class PerExample(VectorClipping):
    """Per-example clipping: the released sum is sum_i nu_i g_i with |nu_i g_i| <= C.

    Args:
        max_norm: C, the clipping norm of one example's gradient. With several parts it is the total, unless a mapping
            gives one number per part. `Quantile` adapts it from step to step; `NormDecay` shrinks it.
        parts: "all" (flat clipping), "layer", "tensor", groups of parameter or module names, or a policy: `Adaptive`,
            `Multipliers`, `ByNorm` or `RandomLayer`, which define the meaning of `max_norm`.
        split: how the noise is divided over several parts: "optimal", "equal", or a weight for each part.
        mode: "clip" scales gradients down to norm C, nu = min(1, C / n); "normalize" scales every gradient to about C,
            nu = C / (n + 0.01 C).
        method: how per-example gradients are computed. All methods give the same sum. "auto" chooses between the first
            two by the free memory. "bookkeeping": one backward pass (the book-keeping form of ghost clipping).
            "reweight": two backward passes, with less memory. "instantiate": one pass, per-example gradients are
            materialized. "vmap": one batched pass. "loop": one pass per example, the reference.
        matmul_precision: the arithmetic of norms and sums. "ieee"; "tf32": TensorFloat-32 on CUDA; "auto": TF32 if
            `torch.set_float32_matmul_precision` allows it when `make_private` is called.
        sparse: `Sparse(...)` freezes converged entries. It requires method "instantiate" (the choice of "auto"),
            "vmap" or "loop".
        running_statistics: `NoisedStatistics(...)` also releases the statistics with which the layers of
            `layers.with_released_statistics(model)` normalize from the next step on.

    Guarantee:
        - Adjacency: zero-out (sensitivity C_k of part k) and replace-one (2 C_k), under every sampling scheme that
          supports the adjacency, except "partition". If a policy scales gradients, these hold for the scaled sum.
        - Unit: one record.
        - Assumption: each loss depends on its own example only. A probe checks this; it is not a proof.
        - Norms are upper bounds in the arithmetic used. A gradient that is not finite, or longer than 1e38 C, is
          replaced by 0.
        - Sums use IEEE float32 or better. Rounding changes the sum of B examples by 1e-5 C plus a few times B u C, with
          u = 2^-24 in float32. No noise is added for this. Convolutions are assumed to be sums of products, as in
          implicit GEMM.
        - "vmap" and "loop" use the gradients of torch's kernels, with rounding that may depend on the other examples.
          Prefer the other methods if terms cancel up to rounding.
        - TF32 changes the contribution of an example by at most e = 2^-9 M, with M the mass of its terms
          (gradients/forms/base.py). It is clipped so that n + e <= (1 + 2^-6) C, which is the stated sensitivity. For
          e <= 2^-6 n the clipping is the same as in IEEE arithmetic.
    """

    max_norm: MaxNorm = 1.0
    parts: Groups | Policy = "all"
    split: Split = "optimal"
    mode: str = "clip"
    method: str = "auto"
    matmul_precision: str = "auto"
    sparse: Sparse | None = None
    running_statistics: NoisedStatistics | None = None

    name = "per-example"

    def __post_init__(self) -> None:
        with_plain_numbers(self)
        self.require_settings()
        one_of("mode", self.mode, MODES)
        one_of("method", self.method, METHODS)
        one_of("matmul_precision", self.matmul_precision, MATMUL_PRECISIONS)
        if self.sparse is not None and self.method not in ("auto", *_WRITTEN):
            choices = ", ".join(map(repr, _WRITTEN))
            raise ConfigurationError(
                f"method={self.method!r} is not supported with sparse=Sparse(...): it computes norms without "
                f"materializing gradients, so they would include frozen entries. Use one of {choices}, or omit method."
            )

    def attach(self, site: Site) -> Clipper:
        if (layer := trainable_clips(site.model)) is not None:
            raise UnsupportedModelError(
                f"The model has clipped layers for Backprop (the first is {layer.name!r}), so its backward pass does "
                "not compute gradients: use Backprop(), or use PerExample on a model without clip_inputs."
            )
        chosen = chosen_arithmetic(next(iter(site.parameters.values())).device)
        return PerExampleClipper(self, site, {"auto": chosen, "tf32": TF32, "ieee": IEEE}[self.matmul_precision])

    def require_views(self) -> None:
        if self.running_statistics is not None:
            raise ConfigurationError(
                "augmentation_multiplicity is not supported with PerExample(running_statistics=...), which requires "
                "one row per example: remove one of them."
            )

    @property
    def takes_split_gradients(self) -> bool:  # type: ignore[override]
        """Whether no option reads or freezes single entries."""
        return self.sparse is None and self.running_statistics is None and not isinstance(self.parts, Policy)

    def describe(self) -> dict[str, Any]:
        """The configuration in JSON types, without `method`, which does not change results, and `matmul_precision`."""
        return self.described() | {"mode": self.mode}


class PerExampleClipper(VectorClipper):
    """`PerExample` for one model."""

    def __init__(self, strategy: PerExample, site: Site, arithmetic: Arithmetic) -> None:
        self._parameters, self.arithmetic, self._mode = site.parameters, arithmetic, strategy.mode
        self._memory, self._joined_squares = Memory(arithmetic), site.joined_squares
        self._all_reached = False  # whether the losses of some batch depended on every parameter
        by_default = strategy.method == "auto" and strategy.sparse is not None
        self._method = "instantiate" if by_default else strategy.method
        constants = strategy.constants(site)
        statistics = LayerStatistics(strategy.running_statistics, site, site.factor)
        self.is_capturable = not statistics.bounds  # the layers change after each release
        super().__init__(constants, site.factor * (1 + arithmetic.slack), site.scheme.expected_size, statistics)

    def clipped_sum(self, losses: Tensor, real_B: Tensor | None = None) -> dict[str, Tensor]:
        """sum_i nu_i g_i over the examples of a batch or of a piece of it."""
        if len(losses) == 0:
            return self.nothing()
        constants = self._constants
        statistics = self._statistics.clipped(losses, by_row=True)
        gradients, left_out = self._gradients(losses)
        if constants.frozen:
            gradients = active_only(gradients, constants.frozen, self._parameters)
        squares, errors = gradients.squared_norms(), gradients.squared_errors()
        for name in left_out:
            squares[name] = torch.zeros_like(next(iter(squares.values())))
        if self._joined_squares is not None:
            squares = self._joined_squares(squares)
        groups, norms, scales = constants.groups, constants.norms, constants.scales
        for name, m in scales.items():  # |m g|^2 = m^2 |g|^2, rounded up
            for each in (squares, errors):
                if name in each:
                    each[name] = each[name] * (m * m * (1 + 2.0**-50))
        part_norms = {
            part: self._bounds_of_norms([squares[n] for n in names], [errors[n] for n in names if n in errors])
            for part, names in groups.items()
        }
        finite_B = _sum(list(part_norms.values())) < math.inf  # norms are at least 0, or NaN
        bad_B = ~finite_B
        if self._memory.rare.any(bad_B):
            gradients.mute(bad_B)
        counted_B = finite_B if real_B is None else finite_B & real_B
        chosen = constants.chosen(self.secret, len(losses)) if constants.alone else {}
        weights = {}
        for part, names in groups.items():
            nu_B = self._weights(part_norms[part], norms[part])
            there_B = counted_B & chosen[part].to(counted_B.device) if chosen else counted_B
            nu_B = torch.where(there_B & (nu_B >= _SMALLEST_WEIGHT), nu_B, 0)
            if part in self._in_float32:
                nu_B = nu_B.float()  # once per part, not per parameter
            weights.update(dict.fromkeys(names, nu_B))
        sums = gradients.weighted_sums(weights)
        sums |= {n: torch.zeros_like(at_least_float32(own_part(self._parameters[n]).detach())) for n in left_out}
        if constants.bounds:
            sums |= constants.counts(part_norms, bad_B, real_B)
        return sums | statistics

    def nothing(self) -> dict[str, Tensor]:
        no_example = torch.zeros(0, dtype=torch.bool, device=next(iter(self._parameters.values())).device)
        counts = self._constants.counts(dict.fromkeys(self._constants.groups, no_example), no_example)
        return super().nothing() | counts | self._statistics.nothing()

    def _gradients(self, losses: Tensor) -> tuple[PerExampleGradients, tuple[str, ...]]:
        """The per-example gradients, and the names of parameters that the losses do not depend on (gradient 0).

        Once every parameter was used in some batch, unused ones (as in a mixture of experts) raise no error: whether
        the records of a batch use a parameter is private.
        """
        try:
            found = per_example_gradients(losses, self._parameters, self._memory, self._method)
            self._all_reached = True
            return found, ()
        except UnreachedParametersError as refusal:
            if not self._all_reached or len(refusal.names) == len(self._parameters):
                raise
            left_out = refusal.names
        reached = {name: p for name, p in self._parameters.items() if name not in left_out}
        return per_example_gradients(losses, reached, self._memory, self._method), left_out

    def _bounds_of_norms(self, squares: list[Tensor], errors: list[Tensor]) -> Tensor:
        """n such that the summed vector has norm at most (1 + slack) n: the norm, unless rounding e is large."""
        norm_B = _sum(squares).sqrt()
        if not errors:
            return norm_B
        error_B = _sum(errors).sqrt()
        return torch.maximum(norm_B, (norm_B + error_B) / (1 + self.arithmetic.slack))

    def _restate(self) -> bool:
        self._in_float32 = {
            part
            for part, names in self._constants.groups.items()
            if all(self._parameters[name].dtype == torch.float32 for name in names)
        }
        return super()._restate()

    def _weights(self, norm_B: Tensor, bound: float) -> Tensor:
        if self._mode == "normalize":
            return bound / (norm_B + _NORMALIZE_FLOOR * bound)
        return (bound / norm_B).clamp(max=1)  # C / 0 is inf, and clamps to 1


def _sum(tensors: list[Tensor]) -> Tensor:
    """The sum of several tensors of one shape, in one kernel."""
    return torch.stack(tensors).sum(0) if len(tensors) > 1 else tensors[0]
