"""Batch clipping: clip the mean gradient of each microbatch, then sum."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.clipping.base import Clipper, Parameters, Site, Split, StatementText
from clipwise.clipping.contrib.sparse import Sparse, without
from clipwise.clipping.noised_statistics import LayerStatistics, NoisedStatistics
from clipwise.clipping.thresholds import Constants, Groups, MaxNorm, Policy
from clipwise.clipping.vector_clipping import VectorClipper, VectorClipping, tensor_lengths
from clipwise.deprecation import renamed_fields
from clipwise.errors import ConfigurationError, StepError, UnreachedParametersError, UnsupportedModelError
from clipwise.gradients import Memory
from clipwise.gradients.real_views import complex_view, dimension, real_view
from clipwise.layers.public_statistics import AllPublicStatistics
from clipwise.privacy import Adjacency, Sampling, Unit
from clipwise.sampling.schemes import Partition
from clipwise.validation.arguments import require_takes, whole, with_plain_numbers

# The margin below C for rounding: of norms in float64, and of a weight and a product in float32 (2^-23).
_MARGIN = 2.0**-20
_MARGIN_64 = 2.0**-40  # without rounding to float32
_UNIT = 2.0**-53  # unit roundoff of float64
_DOUBLE = (torch.float64, torch.complex128)
_LEAST_WEIGHT = 2.0**-100  # smaller weights are replaced by 0
# Schemes with microbatches of (almost) equal size.
_OF_ONE_SIZE = (Sampling.FIXED_SIZE, Sampling.PARTITION, Sampling.FULL)


@renamed_fields(mini_sets="microbatches")
@dataclass(frozen=True)
class Batch(VectorClipping):
    """Batch clipping: the released sum is sum_j [g(S_j)]_C over the microbatches S_j of a batch, over a constant.

    g is the mean gradient of a microbatch (a group in the paper), or a local update computed from it. Examples of the
    same microbatch may depend on each other: batch norm in training mode, contrastive losses. At equal C and noise
    multiplier, the noise on the update is 2 B / k times that of `PerExample`, for batches of B examples.

    The loader yields a batch one microbatch at a time. `private.step` takes the losses of each: one loss per example,
    which are averaged, or a single loss.

    Args:
        max_norm: C, the clipping norm of one microbatch. With several parts it is the total, unless a mapping gives
            one number per part. `NormDecay` shrinks it.
        microbatches: k, the number of microbatches per batch. Record i of the data set is in microbatch i mod k;
            sampling="fixed-size" draws equally many from each. Under "partition" the k drawn blocks are the
            microbatches. With `group=` each user is one microbatch.
        parts: "all" (flat clipping), "layer", "tensor", groups of parameter or module names, or a policy.
        split: how the noise is divided over several parts: "optimal", "equal", or a weight for each part.
        local_update: computes the vector to clip, instead of the gradient. `local_update(model, microbatch)` gets a
            copy of the model and the batch given to `private.step_local_update`. It may train the copy for any number
            of steps, and returns the change of each trainable parameter by name, or None for the changes of the copy.
            SGD with learning rate 1 adds the mean of the clipped changes to the weights. Public statistics of the copy
            are up to date; after changing the copy's weights, call PublicStatistics.of(model).refresh().
        sparse: `Sparse(...)` freezes converged entries.
        running_statistics: `NoisedStatistics(...)` also releases the statistics that batch norm layers need for
            evaluation.

    Guarantee:
        - Adjacency: zero-out and replace-one, under every sampling scheme that supports the adjacency ("partition" not
          with `group=`).
        - Sensitivity of part k for a record: 2 C_k under both, because one record can reverse the clipped mean of its
          microbatch. It changes no other microbatch.
        - If the unit is the whole microbatch (a user, or the only record of its microbatch): C_k under zero-out, 2 C_k
          under replace-one.
        - Assumptions: microbatches are fixed in advance by index, block or user, independently of the draw. The
          contribution of a microbatch depends only on that microbatch, on released values and on fresh random numbers.
          (Buffers of the model are checked; Python state kept by user code is not.)
        - An empty microbatch, or one with a gradient that is not finite, contributes 0; so does a float32 vector longer
          than 2^100 C_k. Norms and sums of several microbatches use float64, and vectors are clipped to
          (1 - 2^-20) C_k, so that norms stay below C_k after rounding.
    """

    max_norm: MaxNorm = 1.0
    microbatches: int = 1
    parts: Groups | Policy = "all"
    split: Split = "optimal"
    local_update: LocalUpdate | None = None
    sparse: Sparse | None = None
    running_statistics: NoisedStatistics | None = None

    name = "batch"
    is_coupled = True
    clips_whole_blocks = True
    protects_users = True

    def __post_init__(self) -> None:
        with_plain_numbers(self)
        self.require_settings()
        whole("microbatches", self.microbatches, least=1)
        if self.local_update is None:
            return
        require_takes("local_update", self.local_update, "local_update(model, microbatch)", None, None)
        if self.running_statistics is not None:
            raise ConfigurationError(
                "running_statistics=NoisedStatistics(...) observes the layers of the model, but local_update runs on a "
                "copy: remove one of them. clipwise.layers.recompute_statistics sets statistics from public data."
            )

    @property
    def has_local_update(self) -> bool:  # type: ignore[override]
        return self.local_update is not None

    @property
    def allows_batch_norm(self) -> bool:  # type: ignore[override]
        """A local update works on a copy of the model, which is discarded."""
        return self.local_update is not None

    def attach(self, site: Site) -> Clipper:
        return BatchClipper(self, site)

    def constants(self, site: Site) -> Constants:
        constants = super().constants(site)
        if constants.bounds:
            raise ConfigurationError(
                "Batch does not support max_norm=Quantile(...) or policies that count examples, because it clips "
                "microbatches: give a number, or use PerExample."
            )
        return constants

    def require_losses(self, losses: Tensor, model: nn.Module, parameters: Parameters) -> None:
        """No check: examples may depend on each other."""

    def describe(self) -> dict[str, Any]:
        update = None if self.local_update is None else name_of(self.local_update)
        return self.described() | {"microbatches": self.microbatches, "local_update": update}

    @classmethod
    def statement_text(cls, recorded: Mapping[str, Any], unit: Unit) -> StatementText:
        what = "mean gradient" if recorded.get("local_update") is None else "local update"
        count = recorded.get("microbatches", 1)
        if unit is Unit.USER:
            found = f"the sum of the clipped {what}s of the users"
        elif count == 1:
            found = f"the clipped {what} of the whole batch"
        else:
            found = f"the sum of the clipped {what}s of {count} microbatches (assigned by record index or block)"
        return replace(super().statement_text(recorded, unit), sum=found)


class BatchClipper(VectorClipper):
    """`Batch` for one model."""

    def __init__(self, strategy: Batch, site: Site) -> None:
        self._update, self._model, self._parameters = strategy.local_update, site.model, site.parameters
        self._memory = Memory()
        self._reached: set[str] = set()  # parameters that the loss of some microbatch depended on
        k, scheme, of_users = strategy.microbatches, site.scheme, site.unit is not Unit.RECORD
        self._most_added = scheme.dataset_size if of_users else k
        # Sums of several vectors use float64: in float32 each addition would round at their scale.
        self._adds_up = of_users or k > 1
        largest = scheme.microbatch_size if isinstance(scheme, Partition) else -(-scheme.dataset_size // k)
        is_alone = of_users or largest == 1  # the unit is a whole microbatch
        factor = 1.0 if is_alone and site.adjacency is Adjacency.ZERO_OUT else 2.0
        vectors = scheme.expected_size if of_users else min(float(k), scheme.expected_size)
        constants = strategy.constants(site)
        statistics = LayerStatistics(strategy.running_statistics, site, factor)
        super().__init__(constants, factor, vectors, statistics)
        if self._margin(list(site.parameters)) >= 0.5:
            raise ConfigurationError(
                "Batch: the rounding error of a sum over this many users or float64 parameters may exceed half of "
                "max_norm: keep parameters in float32."
            )
        # Microbatches cannot be padded, since batch norm would use the rows. So they must have one size.
        has_one_size = not of_users and not scheme.has_random_size and (k == 1 or scheme.sampling in _OF_ONE_SIZE)
        self.is_capturable = has_one_size and strategy.local_update is None and not statistics.bounds

    def clipped_sum(self, losses: Tensor, real_B: Tensor | None = None) -> dict[str, Tensor]:
        """[g]_C of one microbatch, from its losses or its single loss; 0 if it is empty."""
        assert real_B is None  # microbatches are not padded
        if losses.dim() and len(losses) == 0:
            return self.nothing()
        parameters = list(self._parameters.values())
        found: list[Tensor | None] = list(torch.autograd.grad(losses.mean(), parameters, allow_unused=True))
        gradients = {}
        for (name, p), g in zip(self._parameters.items(), found, strict=True):
            if g is not None:
                self._reached.add(name)
            elif name not in self._reached:
                # Later (a mixture of experts) this raises no error, because whether records use a parameter is private.
                raise UnreachedParametersError((name,))
            gradients[name] = torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g
        return self._clipped(gradients) | self._statistics.clipped(losses, by_row=False)

    def clipped_update(self, microbatch: Any) -> dict[str, Tensor]:
        """[-delta]_C of the local update of a non-empty microbatch: optimizers subtract the gradient."""
        assert self._update is not None
        deltas = local_changes(self._update, self._model, microbatch, self._parameters)
        return self._clipped({name: -delta for name, delta in deltas.items()})

    def nothing(self) -> dict[str, Tensor]:
        return self._zeros() | self._statistics.nothing()

    def _clipped(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """nu_k g_k of each part k, nu_k = min(1, C_k / |m g_k|) with the scales m; 0 if the norm is not finite."""
        vectors = without({name: real_view(g) for name, g in vectors.items()}, self._constants.frozen)
        groups = self._constants.groups
        lengths = _lengths(vectors, self._constants.scales)
        pieces = [[lengths[name] for name in names] for names in groups.values()]
        norms = [p[0] if len(p) == 1 else torch.linalg.vector_norm(torch.stack(p)) for p in pieces]
        aims = [self._constants.norms[part] * (1 - self._margin(names)) for part, names in groups.items()]
        over_P = torch.stack(torch._foreach_div(norms, aims))
        if self._memory.rare.any(~over_P.isfinite()):
            return self._zeros()
        nus_P = over_P.clamp(min=1.0).reciprocal()
        # The rounding of a subnormal float32 weight would exceed the margin.
        narrow_nus_P = nus_P.masked_fill(nus_P < _LEAST_WEIGHT, 0.0).float()
        chosen = self._constants.chosen(self.secret, 1)
        result: dict[str, Tensor] = {}
        for (part, names), nu, narrow_nu in zip(groups.items(), nus_P.unbind(), narrow_nus_P.unbind(), strict=True):
            if chosen and not chosen[part]:
                result |= self._zeros(names)
                continue
            for name, t in self._times(nu, narrow_nu, {name: vectors[name].detach() for name in names}).items():
                result[name] = complex_view(t) if self._parameters[name].is_complex() else t
        return result

    def _times(self, nu: Tensor, narrow_nu: Tensor, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """nu g of each vector, in the dtype of its sum. `narrow_nu` is the weight in float32."""
        types = {name: self._dtype(self._parameters[name]) for name in vectors}
        held = {g.dtype for g in vectors.values()}
        is_here = all(g.device == nu.device for g in vectors.values())
        if is_here and torch.float64 not in {*held, *types.values()}:
            given = [g.float() for g in vectors.values()]
            # _foreach_mul is slow for a single tensor.
            found = [given[0] * narrow_nu] if len(given) == 1 else torch._foreach_mul(given, narrow_nu)
        else:
            found = [g.double() * nu.to(g.device) for g in vectors.values()]
        return {name: t.to(types[name]) for name, t in zip(vectors, found, strict=True)}

    def _zeros(self, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        found = {}
        for name in names or self._parameters:
            p, dtype = self._parameters[name], self._dtype(self._parameters[name])
            found[name] = torch.zeros_like(p, dtype=dtype.to_complex() if p.is_complex() else dtype)
        return found

    def _margin(self, names: Sequence[str]) -> float:
        """The fraction of C reserved for rounding: of the norm, of the clipped vector, and of the sum.

        In float64, with u = 2^-53, a sum of d squares has a relative error of at most d u in any order, and a sum of k
        vectors of norm at most C has an error of at most k^2 / 2 u C: twice that for the sums of two neighbours.
        """
        group = [self._parameters[name] for name in names]
        if any(p.dtype not in _DOUBLE for p in group):
            return _MARGIN
        return _MARGIN_64 + _UNIT * (sum(dimension(p) for p in group) + self._most_added**2)

    def _dtype(self, p: Tensor) -> torch.dtype:
        """The dtype of the sum (of its real view, if complex)."""
        return torch.float64 if self._adds_up or p.dtype in _DOUBLE else torch.float32


def _lengths(vectors: Mapping[str, Tensor], scales: Mapping[str, float]) -> dict[str, Tensor]:
    """|m g| of each tensor, in float64, all on one device."""
    tensors = [g.detach() for g in vectors.values()]
    found = tensor_lengths(tensors)
    return {
        name: (length * abs(scales[name]) if scales.get(name, 1.0) != 1 else length).to(tensors[0].device)
        for name, length in zip(vectors, found, strict=True)
    }


LocalUpdate = Callable[[nn.Module, Any], Mapping[str, Tensor] | None]


def local_changes(update: LocalUpdate, model: nn.Module, microbatch: Any, parameters: Parameters) -> dict[str, Tensor]:
    """The change of each parameter, returned by the update or read from its copy; 0 for omitted parameters."""
    own = copied(model)
    with torch.enable_grad():
        deltas = _called(update, own, microbatch)
    if deltas is None:
        now = dict(own.named_parameters())
        deltas = {name: now[name].detach() - p.detach() for name, p in parameters.items()}
    if not isinstance(deltas, Mapping):
        raise StepError(
            "local_update must return a mapping from parameter names to changes, or None to use the changes of its "
            f"copy of the model, not {type(deltas).__name__}."
        )
    found = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for name, delta in deltas.items():
        if name not in parameters:
            raise StepError(f"local_update returned {name!r}, which is not a trainable parameter of the model.")
        p = parameters[name]
        fits = isinstance(delta, Tensor) and delta.layout == torch.strided and not delta.is_meta
        if not fits or delta.shape != p.shape or not (p.is_complex() or delta.is_floating_point()):
            raise StepError(
                f"local_update: the change of {name!r} must be a dense tensor of "
                f"{'complex' if p.is_complex() else 'real'} numbers with the shape {tuple(p.shape)} of the parameter."
            )
        kind = torch.promote_types(delta.dtype, torch.complex64) if p.is_complex() else delta.dtype
        found[name] = delta.detach().to(p.device, kind)
    return found


def _called(update: LocalUpdate, model: nn.Module, microbatch: Any) -> Mapping[str, Tensor] | None:
    """Call the update. torch's batch norm error on a single record contains the batch size, which is private."""
    try:
        return update(model, microbatch)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
    raise StepError(  # outside of the except block, so that it does not chain the original error
        "local_update: a batch norm layer in training mode got a single value per channel, for instance from a "
        "microbatch (or its last piece) of one record. Call clipwise.layers.without_running_statistics(model) before "
        "make_private, which supports this, or use GroupNorm."
    )


def copied(model: nn.Module) -> nn.Module:
    """A copy of the model for one local update. It is discarded afterwards."""
    try:
        copied = copy.deepcopy(model)
    except Exception as error:
        raise UnsupportedModelError(
            f"The model cannot be copied for local_update ({type(error).__name__}): keep no tensors with a gradient "
            "history, open files or locks in its attributes."
        ) from error
    AllPublicStatistics(copied).refresh()
    return copied


def name_of(function: Callable[..., Any]) -> str:
    """The qualified name of a function, for a configuration."""
    named = getattr(function, "func", function)  # of a functools.partial
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', type(named).__qualname__)}"
