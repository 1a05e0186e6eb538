"""Clip the mean of a batch, or of each of its mini-sets, then sum."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.clipping.base import Clipper, Parameters, Site, Split, StatementText
from clipwise.clipping.contrib.sparse import Sparse, without
from clipwise.clipping.grouping import Groups, Policy
from clipwise.clipping.noised_statistics import LayerStatistics, NoisedStatistics
from clipwise.clipping.thresholds import Constants, MaxNorm
from clipwise.clipping.vector_clipping import VectorClipper, VectorClipping, tensor_lengths
from clipwise.errors import ConfigurationError, StepError, UnreachedParametersError, UnsupportedModelError
from clipwise.gradients.rare import PutAside, Rare
from clipwise.gradients.real_views import complex_view, dimension, real_view
from clipwise.layers.all_public_statistics import AllPublicStatistics
from clipwise.privacy import Adjacency, Sampling, Unit
from clipwise.sampling import Partition, Scheme
from clipwise.sampling.schemes import whole
from clipwise.validation.arguments import require_takes, with_plain_numbers

LocalUpdate = Callable[[nn.Module, Any], Mapping[str, Tensor] | None]

# Of C is left: norms in float64, and a weight and a product that are rounded to float32 (2^-23), stay well within it.
_ROOM = 2.0**-20
_ROOM_64 = 2.0**-40  # where nothing is rounded to float32
_UNIT = 2.0**-53  # of rounding to float64
_DOUBLE = (torch.float64, torch.complex128)
_LEAST_WEIGHT = 2.0**-100  # that a vector is multiplied with; it counts 0 instead
# All mini-sets of a batch that is drawn in such a way are of one size, or nearly.
_OF_ONE_SIZE = (Sampling.FIXED_SIZE, Sampling.PARTITION, Sampling.FULL)
_SEPARATE = (
    "what is computed of a mini-set depends on that mini-set, on what was released and on fresh random numbers only: "
    "not proven (examples of a mini-set may depend on one another)"
)


@dataclass(frozen=True)
class Batch(VectorClipping):
    """Batch clipping: the released sum is sum_j [g(S_j)]_C over the mini-sets S_j of a batch, over a constant.

    g is the mean gradient of a mini-set, or anything else that follows from it. So examples may depend on one
    another within a mini-set: batch norm in training mode, contrastive losses. The price is noise. One record can
    turn a clipped mean round, and there are only k of them to average: at one C and one noise multiplier the noise
    on the update is 2 B / k times that of `PerExample` with batches of B, and 2 B times with one mini-set.

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
            model and the batch that was given to `private.step_sets`, may train the copy as long as it likes, and
            returns the change of each trainable parameter by name; or None, and then the change is what became of
            the copy. SGD with a learning rate of 1 adds the mean of the clipped changes to the weights. Public
            statistics of the copy are fresh; after an update of its own it calls PublicStatistics.of(model).refresh().
        sparse: `Sparse(...)` freezes entries that only hover within the noise.
        running_statistics: `NoisedStatistics(...)` releases, beside the gradient, what batch norm layers need for
            evaluation.

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
        if self.local_update is not None:
            require_takes("local_update", self.local_update, "local_update(model, mini_set)", None, None)
        if self.local_update is not None and self.running_statistics is not None:
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
        update = None if self.local_update is None else _name(self.local_update)
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
        return replace(super().statement_text(recorded, unit), sum=found, separate=_SEPARATE)


class BatchClipper(VectorClipper):
    """`Batch` for one model."""

    def __init__(self, strategy: Batch, site: Site) -> None:
        self._strategy, self._model, self._parameters = strategy, site.model, site.parameters
        self._rare = Rare()
        self._reached: set[str] = set()  # parameters that some mini-set of the run has reached
        self._most_added = site.scheme.dataset_size if site.unit is not Unit.RECORD else strategy.mini_sets
        # A sum of many float32 vectors is rounded at their scale again and again; of one there is no sum.
        self._adds_up = site.unit is not Unit.RECORD or strategy.mini_sets > 1
        halves = site.adjacency is Adjacency.ZERO_OUT and _is_mini_set(strategy.mini_sets, site)
        factor = 1.0 if halves else 2.0
        constants = strategy.constants(site)
        statistics = LayerStatistics(strategy.running_statistics, site, factor)
        super().__init__(constants, factor, _expected_mini_sets(strategy.mini_sets, site), statistics)
        if self._room(list(site.parameters)) >= 0.5:
            raise ConfigurationError(
                "Batch: sums of so many users, or of so many parameters in float64, may be rounded by half of "
                "max_norm: keep parameters in float32."
            )
        # Mini-sets cannot be filled up: batch norm would see the rows. So they must be of one size.
        has_one_size = strategy.mini_sets == 1 or site.scheme.sampling in _OF_ONE_SIZE
        is_random = site.unit is not Unit.RECORD or site.scheme.has_random_size
        self.is_capturable = (
            has_one_size and not is_random and strategy.local_update is None and not statistics.bounds
        )

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
        model = copied(self._model)
        with torch.enable_grad():
            given = _called(self._strategy.local_update, model, mini_set)
        deltas = self._changes(model) if given is None else self._given(given)
        return self._clipped({name: -delta for name, delta in deltas.items()})

    def nothing(self) -> dict[str, Tensor]:
        """What an empty mini-set adds."""
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
        clipped = self._clipped_pairs({name: real_view(g) for name, g in vectors.items()})
        of_complex = {
            n for n, t in clipped.items() if self._parameters[n].is_complex() and not t.is_complex()
        }
        return {name: complex_view(t) if name in of_complex else t for name, t in clipped.items()}

    def _clipped_pairs(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same of vectors that are all real."""
        vectors = without(vectors, self._constants.frozen)
        groups, scales = self._constants.groups, self._constants.scales
        lengths = _lengths(vectors, scales)
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
                vectors_here = {name: vectors[name].detach() for name in names}
                result.update(self._times(nu, narrow_nu, vectors_here))
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
        parameters = self._parameters if names is None else {name: self._parameters[name] for name in names}
        types = {
            n: self._dtype(p).to_complex() if p.is_complex() else self._dtype(p)
            for n, p in parameters.items()
        }
        return {name: torch.zeros_like(p, dtype=types[name]) for name, p in parameters.items()}

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

    def _changes(self, model: nn.Module) -> dict[str, Tensor]:
        """What a local update made of its copy."""
        now = dict(model.named_parameters())
        for name in self._parameters:
            if name not in now:
                raise StepError(
                    f"local_update took parameter {name!r} out of the model: return the changes by name instead."
                )
        return self._given({name: now[name].detach() - p.detach() for name, p in self._parameters.items()})

    def _given(self, deltas: object) -> dict[str, Tensor]:
        """What a local update says, one change a parameter; a parameter that is left out has not changed."""
        if not isinstance(deltas, Mapping):
            raise StepError(
                "local_update must return a mapping from parameter names to changes, or None for what it made of "
                f"its copy of the model, not {type(deltas).__name__}."
            )
        for name, delta in deltas.items():
            if name not in self._parameters:
                raise StepError(
                    f"local_update returned {name!r}, which is no trainable parameter of the model."
                )
            p = self._parameters[name]
            fits = isinstance(delta, Tensor) and delta.layout == torch.strided and not delta.is_meta
            if not fits or delta.shape != p.shape or not (p.is_complex() or delta.is_floating_point()):
                raise StepError(
                    f"local_update: the change of {name!r} must be a dense tensor of "
                    f"{'complex' if p.is_complex() else 'real'} numbers, of shape {tuple(p.shape)} as the parameter "
                    "itself."
                )
        return {
            name: _in_space_of(p, deltas[name].detach().to(p.device))
            if name in deltas
            else torch.zeros_like(p)
            for name, p in self._parameters.items()
        }


def _in_space_of(p: Tensor, delta: Tensor) -> Tensor:
    """A change of a complex parameter is complex, however it is given."""
    return delta.to(torch.promote_types(delta.dtype, torch.complex64)) if p.is_complex() else delta


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


def _expected_mini_sets(mini_sets: int, site: Site) -> float:
    """How many clipped vectors a step is expected to have, at most: a constant, whatever was drawn."""
    if site.unit is not Unit.RECORD:
        return site.scheme.expected_size
    return min(float(mini_sets), site.scheme.expected_size)


def _is_mini_set(mini_sets: int, site: Site) -> bool:
    """Whether the protected unit is all of its mini-set: nobody else is ever in it."""
    return site.unit is not Unit.RECORD or _largest(mini_sets, site.scheme) == 1


def _largest(mini_sets: int, scheme: Scheme) -> int:
    """How many records of the data set may meet in one mini-set."""
    if isinstance(scheme, Partition):
        return scheme.mini_set_size
    return -(-scheme.dataset_size // mini_sets)


def _called(update: LocalUpdate, model: nn.Module, mini_set: Any) -> Mapping[str, Tensor] | None:
    """What the update returns. Batch norm of torch's fails on one record and tells the size, which is secret."""
    try:
        return update(model, mini_set)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
    raise StepError(  # out here, so that it does not carry the other one
        "local_update: a batch norm layer in training got a single value a channel, as of a mini-set, or a last piece "
        "of one, of one record. Call clipwise.layers.without_running_statistics(model) before make_private: its layers "
        "accept that; or use GroupNorm."
    )


def copied(model: nn.Module) -> nn.Module:
    """A model of its own for a local update: nothing that it learns stays, and nothing passes to the next one."""
    try:
        copied = copy.deepcopy(model)
    except Exception as error:
        raise UnsupportedModelError(
            f"The model cannot be copied for local_update ({type(error).__name__}): keep no tensors with a gradient "
            "history, open files or locks in its attributes."
        ) from error
    AllPublicStatistics(copied).refresh()
    return copied


def _name(function: Callable[..., Any]) -> str:
    """Enough to tell one function from another in a configuration."""
    named = getattr(function, "func", function)  # of a functools.partial
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', type(named).__qualname__)}"
