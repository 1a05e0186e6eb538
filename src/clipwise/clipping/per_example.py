"""Clip each example's gradient, then sum."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clipwise.clipping.base import Clipper, Parameters, Site, Split, require_records
from clipwise.clipping.contrib.sparse import Sparse, active_only
from clipwise.clipping.grouping import Groups, Policy
from clipwise.clipping.noised_statistics import LayerStatistics, NoisedStatistics
from clipwise.clipping.thresholds import MaxNorm
from clipwise.clipping.vector_clipping import VectorClipper, VectorClipping
from clipwise.errors import ConfigurationError, UnreachedParametersError, UnsupportedModelError
from clipwise.gradients import METHODS, Memory, PerExampleGradients, per_example_gradients
from clipwise.gradients.forms import at_least_float32
from clipwise.gradients.precision import IEEE, TF32, Arithmetic, chosen_arithmetic
from clipwise.gradients.rare import PutAside
from clipwise.layers.clipped.layer import trainable_clips
from clipwise.validation.arguments import one_of, with_plain_numbers

MODES = ("clip", "normalize")
PRODUCTS = ("auto", "ieee", "tf32")
_WRITTEN = ("instantiate", "vmap", "loop")  # methods that write every gradient out
_NORMALIZE_FLOOR = 0.01  # gamma in C g / (|g| + gamma C): keeps tiny gradients from being blown up
_SMALLEST_WEIGHT = torch.finfo(torch.float32).tiny  # a smaller one would be rounded by more than 2^-24


@dataclass(frozen=True)
class PerExample(VectorClipping):
    """Per-example clipping: the released sum is sum_i nu_i g_i with |nu_i g_i| <= C.

    Args:
        max_norm: C, the most that one example's gradient counts; with several parts the total, unless a
            mapping gives one number a part. A `Quantile` adapts it from step to step; a `Decay` shrinks it.
        parts: "all" (flat clipping), "layer", "tensor", groups of parameter or module names, or a policy:
            `Adaptive`, `Multipliers`, `ByNorm` or `RandomLayer`, which say what `max_norm` is to them.
        split: how the noise is divided over several parts: "optimal", "equal", or a weight for each part.
        mode: "clip" scales a gradient down to C if it is longer, nu = min(1, C / n); "normalize" brings
            every gradient close to C, nu = C / (n + 0.01 C).
        method: how per-example gradients are found. "bookkeeping": one backward pass; "reweight": two, which
            keep nothing in between; "instantiate": one, every gradient written out; "vmap": one batched
            pass; "loop": one pass an example, the reference; "auto" chooses. All give the same sum.
        products: the arithmetic of norms and sums. "ieee"; "tf32": TensorFloat-32 on CUDA; "auto": TF32 if
            `torch.set_float32_matmul_precision` allows it when `make_private` is called.
        sparse: `Sparse(...)` freezes entries that only hover within the noise. Gradients are then written out:
            method "instantiate" (which "auto" comes to), "vmap" or "loop".
        running_statistics: `NoisedStatistics(...)` releases, beside the gradient, the statistics by which layers of
            `layers.with_released_statistics(model)` normalize from the next step on.

    Guarantee:
        Adjacency: zero-out (sensitivity C_k of part k) and replace-one (2 C_k), under every sampling
        scheme that knows the adjacency but "partition". Unit: one record. Where a policy scales gradients, both are
        those of the scaled sum.
        Assumptions: each loss depends on its own example only (checked by a probe, which is a lint and no
        proof); norms are upper bounds in the arithmetic used; an example whose gradient is not finite
        counts as 0, and so does one that is 1e38 times longer than C; sums run in IEEE float32 or better,
        whose rounding moves the sum of B examples by 1e-5 C and a few times B u C, u = 2^-24 in float32, for which
        there is no noise; convolutions are taken to be sums of products, as implicit GEMM forms them.
        "vmap" and "loop" take each gradient as torch's kernels sum it, whose rounding may depend on the other examples;
        where terms cancel to nothing but rounding, prefer the other methods.
        With TF32 an example's part of the sum is moved by e = 2^-9 M at most, M the mass of its terms
        (gradients/forms/base.py): it is clipped so that n + e <= (1 + 2^-6) C, and that is the sensitivity that is
        stated and noised. For e <= 2^-6 n this clips as IEEE arithmetic does.
    """

    max_norm: MaxNorm = 1.0
    parts: Groups | Policy = "all"
    split: Split = "optimal"
    mode: str = "clip"
    method: str = "auto"
    products: str = "auto"
    sparse: Sparse | None = None
    running_statistics: NoisedStatistics | None = None

    name = "per-example"

    def __post_init__(self) -> None:
        with_plain_numbers(self)
        self.require_settings()
        one_of("mode", self.mode, MODES)
        one_of("method", self.method, METHODS)
        one_of("products", self.products, PRODUCTS)
        if self.sparse is not None and self.method not in ("auto", *_WRITTEN):
            choices = ", ".join(map(repr, _WRITTEN))
            raise ConfigurationError(
                f"method={self.method!r} does not go with sparse=Sparse(...): it finds norms without writing gradients "
                f"out, and frozen entries cannot be left out of those. Use one of {choices}, or leave method out."
            )

    def attach(self, site: Site) -> Clipper:
        """Bind to a model's trainable parameters."""
        require_records(site.unit, "PerExample")
        if (layer := trainable_clips(site.model)) is not None:
            raise UnsupportedModelError(
                f"This model is clipped for Backprop, first in layer {layer.name!r}, so what comes back in it is no "
                "gradient any more: train it with Backprop(), or PerExample with a model without clip_inputs."
            )
        return PerExampleClipper(self, site, self._arithmetic(site.parameters))

    def _arithmetic(self, parameters: Parameters) -> Arithmetic:
        if self.products == "auto":
            return chosen_arithmetic(next(iter(parameters.values())).device)
        return TF32 if self.products == "tf32" else IEEE

    def require_views(self) -> None:
        if self.running_statistics is not None:
            raise ConfigurationError(
                "averaged_views does not go with PerExample(running_statistics=...), whose layers learn from one row "
                "an example: leave one of them out."
            )

    def describe(self) -> dict[str, Any]:
        """The configuration in plain types. `method` changes no result and is left out; `products` is recorded as the
        clipper's arithmetic."""
        return self.described() | {"mode": self.mode}


class PerExampleClipper(VectorClipper):
    """`PerExample` for one model."""

    def __init__(self, strategy: PerExample, site: Site, arithmetic: Arithmetic) -> None:
        self._strategy, self._parameters, self.arithmetic = strategy, site.parameters, arithmetic
        self._memory = Memory(arithmetic)
        self._all_reached = False  # whether a batch of the run has reached every parameter
        by_default = strategy.method == "auto" and strategy.sparse is not None
        self._method = "instantiate" if by_default else strategy.method
        constants = strategy.constants(site)
        statistics = LayerStatistics(strategy.running_statistics, site, site.factor)
        self.is_capturable = not statistics.bounds  # the layers change after each release
        super().__init__(
            constants, site.factor * (1 + arithmetic.slack), site.scheme.expected_size, statistics
        )

    def clipped_sum(self, losses: Tensor, real_B: Tensor | None = None) -> dict[str, Tensor]:
        """sum_i nu_i g_i over the examples of a batch or of a piece of one."""
        if len(losses) == 0:
            return self.nothing()
        statistics = self._statistics.clipped_by_row(losses)
        gradients, left_out = self._gradients(losses)
        if self._constants.frozen:
            gradients = active_only(gradients, self._constants.frozen, self._parameters)
        squares, errors = gradients.squared_norms(), gradients.squared_errors()
        for name in left_out:
            squares[name] = torch.zeros_like(next(iter(squares.values())))
        groups, norms, scales = self._constants.groups, self._constants.norms, self._constants.scales
        for name, m in scales.items():  # |m g|^2 = m^2 |g|^2, rounded up
            squares[name] = squares[name] * (m * m * (1 + 2.0**-50))
            if name in errors:
                errors[name] = errors[name] * (m * m * (1 + 2.0**-50))
        part_norms = {
            part: self._bounds_of_norms(
                [squares[n] for n in names], [errors[n] for n in names if n in errors]
            )
            for part, names in groups.items()
        }
        finite_B = _sum(list(part_norms.values())) < math.inf  # norms are at least 0, or NaN
        bad_B = ~finite_B
        if self._memory.rare.any(bad_B):
            gradients.mute(bad_B)
        counted_B = finite_B if real_B is None else finite_B & real_B
        chosen = self._constants.chosen(self.secret, len(losses))
        weights = {}
        for part, names in groups.items():
            nu_B = self._weights(part_norms[part], norms[part])
            there_B = counted_B & chosen[part].to(counted_B.device) if chosen else counted_B
            nu_B = torch.where(there_B & (nu_B >= _SMALLEST_WEIGHT), nu_B, 0)
            if part in self._in_float32:
                nu_B = nu_B.float()  # once, and not once a parameter
            weights.update(dict.fromkeys(names, nu_B))
        sums = gradients.weighted_sums(weights)
        sums |= {
            name: torch.zeros_like(at_least_float32(self._parameters[name].detach())) for name in left_out
        }
        return sums | self._constants.counts(part_norms, bad_B, real_B) | statistics

    def nothing(self) -> dict[str, Tensor]:
        device = next(iter(self._parameters.values())).device
        nobody = torch.zeros(0, dtype=torch.bool, device=device)
        counts = self._constants.counts(dict.fromkeys(self._constants.groups, nobody), nobody)
        return super().nothing() | counts | self._statistics.nothing()

    def _gradients(self, losses: Tensor) -> tuple[PerExampleGradients, tuple[str, ...]]:
        """Those of parameters that the losses reach, and the names of the others, whose gradients are 0.

        Once others have reached them, as in a mixture of experts, that these records take another way is their
        secret, and nothing to stop a run for.
        """
        ask = partial(per_example_gradients, losses, memory=self._memory, method=self._method)
        try:
            found = ask(parameters=self._parameters)
            self._all_reached = True
            return found, ()
        except UnreachedParametersError as refusal:
            if not self._all_reached or len(refusal.names) == len(self._parameters):
                raise
            left_out = refusal.names
        return ask(parameters={n: p for n, p in self._parameters.items() if n not in left_out}), left_out

    @contextmanager
    def putting_aside(self) -> Iterator[PutAside]:
        """In this block nothing waits for the device: what hardly ever happens is put aside, to be looked at."""
        before, aside = self._memory.rare, PutAside()
        self._memory.rare = aside
        try:
            yield aside
        finally:
            self._memory.rare = before

    def _bounds_of_norms(self, squares: list[Tensor], errors: list[Tensor]) -> Tensor:
        """n such that what is summed stays within (1 + slack) n: the norm itself, unless rounding e is large."""
        norm_B = _sum(squares).sqrt()
        if not errors:
            return norm_B
        error_B = _sum(errors).sqrt()
        return torch.maximum(norm_B, (norm_B + error_B) / (1 + self.arithmetic.slack))

    def _restate(self) -> None:
        super()._restate()
        self._in_float32 = {
            part
            for part, names in self._constants.groups.items()
            if all(self._parameters[name].dtype == torch.float32 for name in names)
        }

    def _weights(self, norm_B: Tensor, bound: float) -> Tensor:
        if self._strategy.mode == "normalize":
            return bound / (norm_B + _NORMALIZE_FLOOR * bound)
        return (bound / norm_B).clamp(max=1)  # C / 0 is inf, and clamps to 1


def _sum(tensors: list[Tensor]) -> Tensor:
    """Of several tensors of one shape, in one go."""
    return torch.stack(tensors).sum(0) if len(tensors) > 1 else tensors[0]
