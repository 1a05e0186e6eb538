"""Canaries: records that an attacker plants, and their scores in the releases.

A *Dirac* canary is the worst-case record: its gradient is one huge entry in each part of the release, which is clipped
to the full bound. Its loss is a multiple of those entries, and all other records have no gradient. With z the
joint noise multiplier, the entries of all parts combine to a number x that is N(0, 1) without the canary and N(1/z, 1)
with it. The log-likelihood ratios of all releases add up.

The "out" world follows the adjacency: no record under zero-out, a canary of the opposite sign under replace-one. If
whole microbatches are clipped, all other records have the opposite gradient, and the canary flips the clipped mean.

`Recorder` records the releases of a run. A second run computes its own sums and then uses those releases instead of its
own, so that both have the same parameters at every step, as in the definition of adaptive composition.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from clipwise.accounting.gaussian import Array
from clipwise.audit.bounds import log_ratio
from clipwise.engine.observer import Observer, Sums, observing
from clipwise.errors import AuditError, ConfigurationError
from clipwise.noise.key import NoiseKey
from clipwise.privacy import Adjacency, Entry, Event, Part, Unit
from clipwise.sampling.base import Indices
from clipwise.sampling.fetch import Fetcher

if TYPE_CHECKING:
    from clipwise.engine.context import StepContext
    from clipwise.sampling.loader import Piece


MakeRun = Callable[[Any], Any]  # trains on a data set


class RunWatch(Observer):
    """Observes a single run; `run` is that run, once it exists."""

    run: StepContext | None = None

    def follow(self, run: StepContext) -> None:
        """For `begins`: record the run, and refuse a second one."""
        if self.run is not None:
            raise AuditError("make_run made several private runs: audit one at a time.")
        self.run = run


def train(make_run: MakeRun, dataset: Any, watch: RunWatch, seed: int) -> StepContext:
    """Train once under a watch, with torch's generator seeded, and return the run."""
    with torch.random.fork_rng(devices=[]), observing(watch):
        torch.manual_seed(seed)
        make_run(dataset)
    if watch.run is None:
        raise AuditError(
            "make_run made no private run: it must call clipwise.make_private on the data set it is given."
        )
    return watch.run


@dataclass(frozen=True)
class Release:
    """One release: its sums and values, what the run declared about it, and the state of the model before it."""

    sums: Sums  # clipped, without noise
    values: Sums  # the released values: (sum + noise) / divisor
    parts: tuple[Part, ...]
    event: Event
    divisor: float
    state: Mapping[str, Tensor]  # parameters and buffers, by name
    drawn: tuple[int, ...]  # the records it was computed from, if known from the loader

    def noise(self) -> dict[str, Tensor]:
        """The noise added to each (scaled) sum, in float64."""
        return {
            name: m * (self.values[name].double() * self.divisor - self.sums[name].double())
            for part in self.parts
            for name, m in entries(part)
        }


def entries(part: Part) -> list[tuple[str, float]]:
    """The names of a part's sums, with the scale of each."""
    names = part.parameters or (part.name,)
    return list(zip(names, part.scales or (1.0,) * len(names), strict=True))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers of a model, including buffers that are not saved."""
    return {
        name: t.detach().clone()
        for name, t in (*model.named_parameters(), *model.named_buffers())
        if isinstance(t, Tensor)
    }


@dataclass
class Recorder(RunWatch):
    """Records the releases of a run."""

    seed: int  # of the key
    missing: tuple[int, ...] = ()  # units that are left out of every batch
    tape: list[Release] | None = None  # releases that replace those of this run
    releases: list[Release] = field(default_factory=list)
    _drawn: list[int] = field(default_factory=list)

    def key(self) -> NoiseKey:
        """The key of the run at its first step: the same in both runs."""
        return NoiseKey.from_seed(self.seed, b"clipwise.audit/0")

    def begins(self, run: StepContext) -> NoiseKey:
        self.follow(run)
        return self.key()

    def kept(self, run: StepContext, drawn: Indices) -> Indices:
        return drawn[~np.isin(drawn, self.missing)] if self.missing else drawn

    def losses(self, run: StepContext, piece: Piece, losses: Tensor) -> Tensor:
        if piece.index_in_batch == 0:
            self._drawn = []
        self._drawn.extend(piece.indices.tolist())
        return losses

    def released(self, run: StepContext, sums: Sums, noised: Callable[[Sums], Sums]) -> Sums:
        kept = _copy(sums)
        values = noised(sums)
        declared = tuple(run.current_parts()), run.event, run.clipper.divisor
        state, drawn = state_of(run.model), tuple(self._drawn)
        self.releases.append(Release(kept, _copy(values), *declared, state, drawn))
        self._drawn = []
        place = len(self.releases) - 1
        # One example more must not shift the random numbers of the next step.
        torch.default_generator.manual_seed(self.seed + place + 1)
        if self.tape is None or place >= len(self.tape):
            return values
        replayed = self.tape[place].values
        return _copy(replayed) if replayed.keys() == values.keys() else values


def _copy(values: Sums) -> Sums:
    with torch.no_grad():
        return {name: t.detach().clone() for name, t in values.items()}


_LOUD = 1e4  # times the sensitivity: the norm of a canary's gradient before clipping
_OPPOSED = 1e-4  # the share of it that all other records of a microbatch have, with the opposite sign


@dataclass
class Planted(RunWatch, ABC):
    """A run with canaries in place of some of its records."""

    key: NoiseKey
    records: NDArray[np.int64]  # the canaries' indices in the data set
    inside: NDArray[np.bool_]  # which of them take part
    again: Sequence[NoiseKey] = ()  # further keys; every release is noised again with each and scored
    more: list[Array] = field(default_factory=list)  # the scores of those, one row per key
    scores: Array = field(default_factory=lambda: np.zeros(0))

    def begins(self, run: StepContext) -> NoiseKey:
        self.follow(run)
        if run.event.unit is Unit.USER:
            raise ConfigurationError("Canaries are single records: use neighbours() for a run that protects users.")
        if run.event.noise_multiplier == 0:
            raise ConfigurationError("The run has no noise, so it has no guarantee to measure.")
        self.scores = np.zeros(len(self.records))
        return self.key

    def trained(self, make_run: MakeRun, dataset: Any, seed: int) -> list[Entry]:
        """Train once under this watch; returns the charged events."""
        history = train(make_run, dataset, self, seed).ledger.history()
        if not history:
            raise AuditError("make_run made no step: there is nothing to measure.")
        return history

    @property
    def delta(self) -> float:
        """The delta of the run."""
        assert self.run is not None
        return self.run.plan.delta

    def kept(self, run: StepContext, drawn: Indices) -> Indices:
        if run.event.adjacency is Adjacency.REPLACE_ONE:
            return drawn
        return drawn[~np.isin(drawn, self.records[~self.inside])]

    def released(self, run: StepContext, sums: Sums, noised: Callable[[Sums], Sums]) -> Sums:
        own = run.keys.key
        for key in self.again:
            run.keys.key = key
            self.more.append(self.scored(run, noised({n: t.clone() for n, t in sums.items()})))
        run.keys.key = own
        values = noised(sums)
        self.scores = self.scores + self.scored(run, values)
        return values

    @abstractmethod
    def scored(self, run: StepContext, values: Sums) -> Array:
        """The score of one release for each canary: larger means "in"."""


@dataclass
class Dirac(Planted):
    """Dirac canaries, each with its own entry in every part, of `parameter` or the largest parameter of the part."""

    parameter: str | None = None
    _places: dict[str, Tensor] = field(default_factory=dict)

    def begins(self, run: StepContext) -> NoiseKey:
        key = super().begins(run)
        if run.strategy.has_local_update:
            raise ConfigurationError(
                "A local update has no losses in which to insert a Dirac canary: use neighbours()."
            )
        if run.strategy.bounds_inside:
            raise ConfigurationError(
                f"{type(run.strategy).__name__} bounds gradients inside the network, and a Dirac canary is a loss "
                "that bypasses it: use canary(kind='mislabelled', loss=...), kind='record' with a record of your "
                "own, or neighbours()."
            )
        if run.strategy.is_coupled and len(self.records) > 1:
            raise ConfigurationError("If whole microbatches are clipped, there is one canary per run: use canary().")
        for part in run.current_parts():
            if part.parameters:
                name, canaries = self._home(part, run), len(self.records)
                if (size := run.parameters[name].numel()) < canaries:
                    raise ConfigurationError(
                        f"{canaries} canaries need as many entries, and {name!r} has {size}: give fewer canaries."
                    )
                self._places[part.name] = torch.arange(canaries) * (size // canaries)
        return key

    def _home(self, part: Part, run: StepContext) -> str:
        if self.parameter in part.parameters:
            return str(self.parameter)
        return max(part.parameters, key=lambda name: run.parameters[name].numel())

    def losses(self, run: StepContext, piece: Piece, losses: Tensor) -> Tensor:
        order = np.argsort(self.records)
        place = np.searchsorted(self.records[order], piece.indices).clip(max=len(order) - 1)
        canary_B = order[place]
        is_canary_B = self.records[canary_B] == piece.indices
        weight_B = np.where(is_canary_B, np.where(self.inside[canary_B], 1.0, -1.0), 0.0)
        if run.strategy.is_coupled:
            weight_B = np.where(is_canary_B, weight_B, -_OPPOSED)
        if not len(weight_B):
            return losses
        # The loss of each canary becomes a multiple of its own entries.
        own_B: Tensor | float = 0.0
        for part in run.current_parts():
            if part.name in self._places:
                name = self._home(part, run)
                p = run.parameters[name]
                loud = _LOUD * part.sensitivity / dict(entries(part))[name]
                own_B = own_B + loud * _picked(p, self._places[part.name][torch.from_numpy(canary_B)].to(p.device))
        weights = torch.from_numpy(weight_B).to(losses.device, losses.dtype)
        own_B = weights * own_B
        if losses.dim() == 0:  # of a microbatch as a whole
            return 0 * losses + own_B.mean()
        return losses.masked_fill(torch.ones_like(weights, dtype=torch.bool), 0) + own_B  # keeps the graph

    def scored(self, run: StepContext, values: Sums) -> Array:
        total, square = np.zeros(len(self.records)), 0.0
        for part in run.current_parts():
            if part.name in self._places and part.noise_std > 0:
                name = self._home(part, run)
                scale = dict(entries(part))[name] * run.clipper.divisor / part.noise_std
                seen = values[name].detach().reshape(-1)[self._places[part.name].to(values[name].device)]
                ratio = part.sensitivity / part.noise_std
                total += ratio * scale * seen.double().numpy(force=True)
                square += ratio * ratio
        # The log-likelihood ratio of "in" against "out".
        shift, rate = math.sqrt(square), run.event.sample_rate  # 1 / z
        x = total / shift
        if run.strategy.is_coupled:  # from -C to C, among k - 1 others at -C
            return log_ratio(x + run.clipper.divisor * shift / 2, shift, rate)
        if run.event.adjacency is Adjacency.REPLACE_ONE:  # from -C to C, among 0 for those not drawn
            return log_ratio(x, shift / 2, rate) - log_ratio(x, -shift / 2, rate)
        return log_ratio(x, shift, rate)


def _picked(p: Tensor, entry_B: Tensor) -> Tensor:
    """One entry of a parameter for each example: y^T W x with unit vectors x and y, as cheap as a layer.

    Indexing the parameter would also work, but data-dependent indices would make every step be probed for coupling.
    """
    W_pd = p.reshape(len(p), -1) if p.dim() > 1 else p.reshape(1, -1)
    x_Bd = F.one_hot(entry_B % W_pd.shape[1], W_pd.shape[1]).to(p.dtype)
    y_Bp = F.one_hot(entry_B // W_pd.shape[1], W_pd.shape[0]).to(p.dtype)
    return (F.linear(x_Bd, W_pd) * y_Bp).sum(1)


@dataclass
class Record(Planted):
    """A canary that is an ordinary record, such as a mislabelled one, detected by its gradient.

    The attacker computes this gradient at the parameters of each release and projects the release onto it. The other
    records act as noise in this direction, so scores are only ordered: larger means "in".
    """

    loss: Callable[..., Tensor] | None = None  # `loss(model, *batch)` returns one loss per example
    home: Any = None  # a data set with the canary, whether or not this run includes it
    _direction: dict[str, Tensor] = field(default_factory=dict)

    def released(self, run: StepContext, sums: Sums, noised: Callable[[Sums], Sums]) -> Sums:
        self._direction = self._looked_along(run)  # the same for all repeated noisings
        return super().released(run, sums, noised)

    def scored(self, run: StepContext, values: Sums) -> Array:
        return np.array([sum(float((d * values[n].double()).sum()) for n, d in self._direction.items())])

    def _looked_along(self, run: StepContext) -> dict[str, Tensor]:
        """S_k m^2 g / (|m g|_k s_k^2) times the divisor: the best test for a shift S_k along its gradient."""
        assert self.loss is not None
        names = list(run.parameters)
        with torch.enable_grad():
            batch = Fetcher(self.home, run.loader.fetcher.collate_fn)[self.records[:1]]
            loss = self.loss(run.model, *batch).sum()
            found = torch.autograd.grad(loss, [run.parameters[n] for n in names], allow_unused=True)
        gradient = {n: g.double() for n, g in zip(names, found, strict=True) if g is not None}
        direction = {}
        for part in run.current_parts():
            own = [(n, m) for n, m in entries(part) if n in gradient]
            length = math.sqrt(sum(float((m * gradient[n]).square().sum()) for n, m in own))
            if length == 0 or part.noise_std == 0:
                continue
            factor = part.sensitivity * run.clipper.divisor / (length * part.noise_std**2)
            direction.update({n: factor * m * m * gradient[n] for n, m in own})
        return direction
