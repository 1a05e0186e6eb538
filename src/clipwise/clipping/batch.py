"""Clip the mean of a batch, or of each of its mini-sets, then sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.clipping.base import Clipper, Parameters, Site, Split, StatementText
from clipwise.clipping.contrib.sparse import Sparse, without
from clipwise.clipping.grouping import Groups, Policy
from clipwise.clipping.local_update import LocalUpdate, local_changes, name_of
from clipwise.clipping.noised_statistics import LayerStatistics, NoisedStatistics
from clipwise.clipping.thresholds import Constants, MaxNorm
from clipwise.clipping.vector_clipping import VectorClipper, VectorClipping, tensor_lengths
from clipwise.errors import ConfigurationError, UnreachedParametersError
from clipwise.gradients.rare import PutAside, Rare
from clipwise.gradients.real_views import complex_view, dimension, real_view
from clipwise.privacy import Adjacency, Sampling, Unit
from clipwise.sampling import Partition
from clipwise.validation.arguments import require_takes, whole, with_plain_numbers

# Of C is left: norms in float64, and a weight and a product that are rounded to float32 (2^-23), stay well within it.
_ROOM = 2.0**-20
_ROOM_64 = 2.0**-40  # where nothing is rounded to float32
_UNIT = 2.0**-53  # of rounding to float64
_DOUBLE = (torch.float64, torch.complex128)
_LEAST_WEIGHT = 2.0**-100  # that a vector is multiplied with; it counts 0 instead
# All mini-sets of a batch that is drawn in such a way are of one size, or nearly.
_OF_ONE_SIZE = (Sampling.FIXED_SIZE, Sampling.PARTITION, Sampling.FULL)


@dataclass(frozen=True)
class Batch(VectorClipping):
    """Batch clipping: the released sum is sum_j [g(S_j)]_C over the mini-sets S_j of a batch, over a constant.

    g is the mean gradient of a mini-set, or anything else that is computed from it. Examples may depend on one another
    within a mini-set: batch norm in training mode, contrastive losses. The price is noise: at the same C and noise
    multiplier, the noise on the update is 2 B / k times that of `PerExample` with batches of B, for k mini-sets.

    The loader hands out a batch mini-set by mini-set, and `private.step` takes the losses of each: one an example,
    whose mean is taken, or a single number.

    Args:
        max_norm: C, the most that one mini-set counts; with several parts the total, unless a mapping gives one
            number a part. A `Decay` shrinks it.
        mini_sets: k, how many mini-sets a batch has. Record i of the data set is in mini-set i mod k, and under
            sampling="fixed-size" as many are drawn of each. Under "partition" the k blocks that are drawn are the
            mini-sets. With `group=` each user is one.
        parts: "all" (flat clipping), "layer", "tensor", groups of parameter or module names, or a policy.
        split: how the noise is divided over several parts: "optimal", "equal", or a weight for each part.
        local_update: what is clipped in place of the gradient: `local_update(model, mini_set)` gets a copy of the
            model and the batch that was given to `private.step_sets`, may train the copy for any number of steps, and
            returns the change of each trainable parameter by name; or None, for the changes of the copy itself. SGD
            with a learning rate of 1 adds the mean of the clipped changes to the weights. Public statistics of the copy
            are fresh; after an update of its own it calls PublicStatistics.of(model).refresh().
        sparse: `Sparse(...)` freezes entries that do not move by more than the noise.
        running_statistics: `NoisedStatistics(...)` releases, beside the gradient, the statistics that batch norm layers
            need for evaluation.

    Guarantee:
        Adjacency: zero-out and replace-one, under every sampling scheme that knows the adjacency ("partition" not with
        `group=`). Sensitivity of part k: 2 C_k for a record, under both, because a record that comes or goes can turn
        the clipped mean of its mini-set round; it moves no other mini-set. If the unit is the mini-set itself (a
        user, or a record with none beside it in its mini-set), C_k under zero-out and 2 C_k under replace-one.
        Assumptions: mini-sets are fixed beforehand by index, block or user, whatever the draw; an empty one adds
        nothing; what is computed of a mini-set depends on that mini-set, on what was released and on fresh random
        numbers, and on no other mini-set (buffers of the model are watched; a list that your code keeps is not).
        A mini-set whose gradient is not finite counts as 0, and so does what float32 holds and is longer than
        2^100 C_k. Norms are taken in float64, and so are the sums of several mini-sets, and vectors are clipped to
        (1 - 2^-20) C_k, so that rounding does not pass C_k.
    """

    max_norm: MaxNorm = 1.0
    mini_sets: int = 1
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
        whole("mini_sets", self.mini_sets, least=1)
        if self.local_update is None:
            return
        require_takes("local_update", self.local_update, "local_update(model, mini_set)", None, None)
        if self.running_statistics is not None:
            raise ConfigurationError(
                "running_statistics=NoisedStatistics(...) learns from the layers of the model itself, and a "
                "local_update runs on a copy: leave one of them out. clipwise.layers.recompute_statistics sets "
                "statistics from public data."
            )

    @property
    def has_local_update(self) -> bool:  # type: ignore[override]
        return self.local_update is not None

    @property
    def allows_batch_norm(self) -> bool:  # type: ignore[override]
        """A local update works on a copy, whatever its layers learn."""
        return self.local_update is not None

    def attach(self, site: Site) -> Clipper:
        """Bind to a model's trainable parameters."""
        return BatchClipper(self, site)

    def constants(self, site: Site) -> Constants:
        constants = super().constants(site)
        if constants.bounds:
            raise ConfigurationError(
                "max_norm=Quantile(...) and policies that count examples are not for Batch, which clips mini-sets: "
                "give a number, or use PerExample."
            )
        return constants

    def require_losses(self, losses: Tensor, model: nn.Module, parameters: Parameters) -> None:
        """Any will do: examples may depend on one another."""

    def describe(self) -> dict[str, Any]:
        """The configuration in plain types."""
        update = None if self.local_update is None else name_of(self.local_update)
        return self.described() | {"mini_sets": self.mini_sets, "local_update": update}

    @classmethod
    def statement_text(cls, recorded: Mapping[str, Any], unit: Unit) -> StatementText:
        what = "mean gradient" if recorded.get("local_update") is None else "local update"
        count = recorded.get("mini_sets", 1)
        if unit is Unit.USER:
            found = f"the sum of every user's clipped {what}"
        elif count == 1:
            found = f"the clipped {what} of the whole batch"
        else:
            found = f"the sum of the clipped {what}s of {count} mini-sets (a record's mini-set is fixed by its place)"
        return replace(super().statement_text(recorded, unit), sum=found)


class BatchClipper(VectorClipper):
    """`Batch` for one model."""

    def __init__(self, strategy: Batch, site: Site) -> None:
        self._strategy, self._model, self._parameters = strategy, site.model, site.parameters
        self._rare = Rare()
        self._reached: set[str] = set()  # parameters that some mini-set of the run has reached
        k, scheme, of_users = strategy.mini_sets, site.scheme, site.unit is not Unit.RECORD
        self._most_added = scheme.dataset_size if of_users else k
        # A sum of many float32 vectors is rounded at their scale again and again; of one there is no sum.
        self._adds_up = of_users or k > 1
        largest = scheme.mini_set_size if isinstance(scheme, Partition) else -(-scheme.dataset_size // k)
        is_alone = of_users or largest == 1  # the protected unit is all of its mini-set
        factor = 1.0 if is_alone and site.adjacency is Adjacency.ZERO_OUT else 2.0
        vectors = scheme.expected_size if of_users else min(float(k), scheme.expected_size)
        constants = strategy.constants(site)
        statistics = LayerStatistics(strategy.running_statistics, site, factor)
        super().__init__(constants, factor, vectors, statistics)
        if self._room(list(site.parameters)) >= 0.5:
            raise ConfigurationError(
                "Batch: sums of so many users, or of so many parameters in float64, may be rounded by half of "
                "max_norm: keep parameters in float32."
            )
        # Mini-sets cannot be filled up: batch norm would see the rows. So they must be of one size.
        has_one_size = (
            not of_users and not scheme.has_random_size and (k == 1 or scheme.sampling in _OF_ONE_SIZE)
        )
        self.is_capturable = has_one_size and strategy.local_update is None and not statistics.bounds

    def clipped_sum(self, losses: Tensor, real_B: Tensor | None = None) -> dict[str, Tensor]:
        """[g]_C of one mini-set, from the losses of its examples or from their loss as a whole; 0 of an empty one."""
        assert real_B is None  # mini-sets are not filled up
        if losses.dim() and len(losses) == 0:
            return self.nothing()
        found = torch.autograd.grad(losses.mean(), list(self._parameters.values()), allow_unused=True)
        gradients = {
            name: self._missing(name) if g is None else g.to_dense() if g.is_sparse else g
            for name, g in zip(self._parameters, found, strict=True)
        }
        self._reached.update(name for name, g in zip(self._parameters, found, strict=True) if g is not None)
        return self._clipped(gradients) | self._statistics.clipped(losses)

    def clipped_update(self, mini_set: Any) -> dict[str, Tensor]:
        """[-delta]_C of the local update of one mini-set that is not empty: an optimizer goes against a gradient."""
        assert self._strategy.local_update is not None
        deltas = local_changes(self._strategy.local_update, self._model, mini_set, self._parameters)
        return self._clipped({name: -delta for name, delta in deltas.items()})

    def nothing(self) -> dict[str, Tensor]:
        return self._zeros() | self._statistics.nothing()

    @contextmanager
    def putting_aside(self) -> Iterator[PutAside]:
        """In this block it is not asked whether a gradient is finite."""
        aside = self._rare = PutAside()
        try:
            yield aside
        finally:
            self._rare = Rare()

    def _clipped(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """nu_k g_k of each part k, nu_k = min(1, C_k / |m g_k|) with the scales m; 0 if the norm is not finite."""
        vectors = without({name: real_view(g) for name, g in vectors.items()}, self._constants.frozen)
        groups = self._constants.groups
        lengths = _lengths(vectors, self._constants.scales)
        norms = [_norm([lengths[name] for name in names]) for names in groups.values()]
        aims = [self._constants.norms[part] * (1 - self._room(names)) for part, names in groups.items()]
        over_P = torch.stack(torch._foreach_div(norms, aims))
        if self._rare.any(~over_P.isfinite()):
            return self._zeros()
        nus_P = over_P.clamp(min=1.0).reciprocal()
        # A weight that float32 holds in part only would be rounded by more than the room that is left.
        narrow_nus_P = nus_P.masked_fill(nus_P < _LEAST_WEIGHT, 0.0).float()
        chosen = self._constants.chosen(self.secret, 1)
        result: dict[str, Tensor] = {}
        for (part, names), nu, narrow_nu in zip(
            groups.items(), nus_P.unbind(), narrow_nus_P.unbind(), strict=True
        ):
            if chosen and not chosen[part]:
                result.update(self._zeros(names))
            else:
                clipped = self._times(nu, narrow_nu, {name: vectors[name].detach() for name in names})
                is_complex = {n: self._parameters[n].is_complex() for n in names}
                result.update((n, complex_view(t) if is_complex[n] else t) for n, t in clipped.items())
        return result

    def _times(self, nu: Tensor, narrow_nu: Tensor, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """nu g of each, in the type of its sum. The weight comes in float64, and in float32 for what is float32."""
        types = {name: self._dtype(self._parameters[name]) for name in vectors}
        held = {g.dtype for g in vectors.values()}
        is_here = all(g.device == nu.device for g in vectors.values())
        if is_here and torch.float64 not in {*held, *types.values()}:
            given = [g.float() for g in vectors.values()]
            # (The call for many is slow for one.)
            found = [given[0] * narrow_nu] if len(given) == 1 else torch._foreach_mul(given, narrow_nu)
        else:
            found = [g.double() * nu.to(g.device) for g in vectors.values()]
        return {name: t.to(types[name]) for name, t in zip(vectors, found, strict=True)}

    def _missing(self, name: str) -> Tensor:
        """The gradient of a parameter that a mini-set does not reach: 0, if others do, as in a mixture of experts.

        That records take another way is their secret, and nothing to stop a run for.
        """
        if name not in self._reached:
            raise UnreachedParametersError(
                f"Trainable parameter {name!r} takes no part in the losses, so its private gradient would be pure "
                "noise. Freeze it with requires_grad_(False), or use it in the forward pass; within "
                "torch.utils.checkpoint give use_reentrant=False.",
                (name,),
            )
        return torch.zeros_like(self._parameters[name])

    def _zeros(self, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        parameters = {name: self._parameters[name] for name in names or self._parameters}
        return {
            name: torch.zeros_like(p, dtype=self._dtype(p).to_complex() if p.is_complex() else self._dtype(p))
            for name, p in parameters.items()
        }

    def _room(self, names: Sequence[str]) -> float:
        """How much of C is left for rounding: of the norm, of what is clipped, and of its sum.

        In float64, with u = 2^-53, a sum of d squares is off by d u at most, in any order, and a sum of k vectors that
        are no longer than C by k^2 / 2 u C: twice that for the sums of two neighbours.
        """
        group = [self._parameters[name] for name in names]
        if any(p.dtype not in _DOUBLE for p in group):
            return _ROOM
        return _ROOM_64 + _UNIT * (sum(dimension(p) for p in group) + self._most_added**2)

    def _dtype(self, p: Tensor) -> torch.dtype:
        """Of the sum, or of the pairs in it."""
        return torch.float64 if self._adds_up or p.dtype in _DOUBLE else torch.float32


def _lengths(vectors: Mapping[str, Tensor], scales: Mapping[str, float]) -> dict[str, Tensor]:
    """|m g| of each tensor, in float64, all on one device."""
    tensors = [g.detach() for g in vectors.values()]
    found = tensor_lengths(tensors)
    return {
        name: (length * abs(scales[name]) if scales.get(name, 1.0) != 1 else length).to(tensors[0].device)
        for name, length in zip(vectors, found, strict=True)
    }


def _norm(lengths: list[Tensor]) -> Tensor:
    """Of a vector, from those of its pieces."""
    found: Tensor = lengths[0] if len(lengths) == 1 else torch.linalg.vector_norm(torch.stack(lengths))
    return found
