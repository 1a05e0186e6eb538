"""What a run released, kept so that a second run can be made to go the same way.

After the first step the parameters of two neighbouring runs differ, and comparing their later sums would say
nothing about one release. So the second run *replays*: it computes its own sums, and then gets the first run's
released values in the place of its own. At every step both stand at the same parameters, as in the definition of
adaptive composition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from clipwise.audit.watch import RunWatch
from clipwise.engine.observer import Sums
from clipwise.noise.key import NoiseKey
from clipwise.privacy import Event, Part
from clipwise.sampling.base import Indices

if TYPE_CHECKING:
    from clipwise.engine.context import StepContext
    from clipwise.sampling.loader import Piece


@dataclass(frozen=True)
class Release:
    """One release: its sums and values, what the run declared about it, and the state of the model before it."""

    sums: Sums  # bounded, without noise
    values: Sums  # what was released: (sum + noise) / divisor
    parts: tuple[Part, ...]
    event: Event
    divisor: float
    state: Mapping[str, Tensor]  # parameters and buffers, by name
    drawn: tuple[int, ...]  # the records that it was computed from, where the loader handed losses back

    def noise(self) -> dict[str, Tensor]:
        """What was added to each (scaled) sum, in float64."""
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
    """All that leaves with a model, and what it keeps besides."""
    return {
        name: t.detach().clone()
        for name, t in (*model.named_parameters(), *model.named_buffers())
        if isinstance(t, Tensor)
    }


@dataclass
class Recorder(RunWatch):
    """Keeps the releases of a run."""

    seed: int  # of the key
    missing: tuple[int, ...] = ()  # units that are left out of every draw
    tape: list[Release] | None = None  # releases to put in the place of this run's own
    releases: list[Release] = field(default_factory=list)
    _drawn: list[int] = field(default_factory=list)

    def key(self) -> NoiseKey:
        """The key of the run at its first step: the same in both runs, whatever their data are."""
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
        # What was drawn for one example more must not move the random numbers of the next step.
        torch.default_generator.manual_seed(self.seed + place + 1)
        if self.tape is None or place >= len(self.tape):
            return values
        replayed = self.tape[place].values
        return _copy(replayed) if replayed.keys() == values.keys() else values


def _copy(values: Sums) -> Sums:
    with torch.no_grad():
        return {name: t.detach().clone() for name, t in values.items()}
