"""Records the releases of a run, so that a second run can replay them.

After the first step the parameters of two neighbouring runs differ, so their later sums would not be comparable.
Therefore the second run computes its own sums, and then uses the released values of the first run instead of its own.
Both runs have the same parameters at every step, as in the definition of adaptive composition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from clipwise.engine.observer import Observer, Sums, observing
from clipwise.errors import AuditError
from clipwise.noise.key import NoiseKey
from clipwise.privacy import Event, Part
from clipwise.sampling.base import Indices

if TYPE_CHECKING:
    from clipwise.engine.context import StepContext
    from clipwise.sampling.loader import Piece


MakeRun = Callable[[Any], Any]  # trains on a data set


class RunWatch(Observer):
    """Observes a single run; `run` is that run, once it exists."""

    run: StepContext | None = None

    def follow(self, run: StepContext) -> None:
        """For `begins`: remember the run, and refuse a second one."""
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
