"""The plan of a private run, and functions that validate and resolve the arguments of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clipwise import accounting
from clipwise.clipping import Clipper, Strategy
from clipwise.distributed.layouts import ModelLayout
from clipwise.distributed.ranks import OneRank
from clipwise.errors import ConfigurationError, warn
from clipwise.layers.public_statistics import AllPublicStatistics
from clipwise.ledger.budget import PrivacyBudget
from clipwise.ledger.ledger import Ledger
from clipwise.ledger.multi_run import Held
from clipwise.noise.secure import require_cipher
from clipwise.optim.averaging import AveragedParameters, Penalty
from clipwise.privacy import SUPPORTED, Adjacency, Event, Part, Sampling, Unit
from clipwise.sampling.augmentation import Views
from clipwise.sampling.base import Scheme
from clipwise.sampling.microbatches import Cut
from clipwise.validation.arguments import number, one_of, whole
from clipwise.validation.first_batches import Loss

# Far beyond any use; their squares fit into float32.
_LEAST_NOISE, _MOST_NOISE = 1e-9, 1e12


@dataclass(frozen=True)
class Plan:
    """The validated and resolved arguments of `make_private`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    parameters: dict[str, nn.Parameter]
    dataset: Any
    scheme: Scheme
    strategy: Strategy
    clipper: Clipper
    parts: tuple[Part, ...]
    event: Event
    noise: str
    budget: PrivacyBudget | None
    delta: float
    planned: int | None
    multiplier: float
    ledger: Ledger
    resume_file: Path | None
    seed: int | None
    cut: Cut | None
    public_statistics: AllPublicStatistics | None
    views: Views | None
    averages: AveragedParameters | None
    penalty: Penalty | None
    loader_options: Mapping[str, Any]
    collate_fn: Callable[[list[Any]], Any] | None
    probe: bool
    changed_before: list[str]
    ranks: OneRank
    layout: ModelLayout
    loss: Loss | None = None


@dataclass(frozen=True)
class Draws:
    """How batches are drawn and cut, and the adjacency and unit of the guarantee."""

    scheme: Scheme
    adjacency: Adjacency
    unit: Unit
    cut: Cut | None

    def event(self, noise_multiplier: float) -> Event:
        """The event of one step with this noise."""
        return self.scheme.event(noise_multiplier, self.adjacency, self.unit)


@dataclass(frozen=True)
class PrivacyTarget:
    """The privacy of a run: a budget for the planned steps, or a noise multiplier."""

    epsilon: float | None
    delta: float
    planned: int | None
    noise_multiplier: float | None

    @property
    def budget(self) -> PrivacyBudget | None:
        """None if a noise multiplier was given."""
        if self.epsilon is None or self.planned is None:
            return None
        return PrivacyBudget(self.epsilon, self.delta, self.planned)

    def multiplier(self, event: Event, held: Held) -> float:
        """z: as given, or the smallest for which the ledger's releases and the planned steps fit the budget."""
        z, epsilon = self.noise_multiplier, self.epsilon
        if (z is None) == (epsilon is None):
            raise ConfigurationError("Give either epsilon (with delta) or noise_multiplier, and not both.")
        if epsilon is None:
            z = number("noise_multiplier", z, least=0, most=_MOST_NOISE)
            return z if z == 0 else number("noise_multiplier", z, least=_LEAST_NOISE)
        epsilon = number("epsilon", epsilon, above=0)
        if self.planned is None:
            raise ConfigurationError("epsilon needs epochs or steps: the noise is calibrated for them.")
        held.require_fitting(event, epsilon, self.delta)
        found = held.noise_for(event, self.planned, epsilon, self.delta)
        return accounting.smallest_noise(event, self.planned, epsilon, self.delta) if found is None else found


def adjacency_of(adjacency: str | Adjacency | None, sampling: Sampling) -> Adjacency:
    """The neighbouring relation: as given, or the default of the sampling scheme."""
    if adjacency is None:
        return SUPPORTED[sampling][0]
    found: Adjacency = one_of("adjacency", adjacency, Adjacency)
    return found


def require_for_a_run(adjacency: Adjacency, sampling: Sampling) -> None:
    """Raise for an adjacency that the sampling does not support, or that keeps the data set's size secret."""
    if adjacency is Adjacency.ADD_REMOVE:
        raise ConfigurationError(
            "adjacency='add-remove' hides the size of the data set, but make_private derives the sample rate, the "
            "number of steps and delta from that size: use 'zero-out' with Poisson sampling, with the same epsilon."
        )
    if adjacency not in SUPPORTED[sampling]:
        usable = " or ".join(repr(str(a)) for a in SUPPORTED[sampling] if a is not Adjacency.ADD_REMOVE)
        raise ConfigurationError(
            f"adjacency={str(adjacency)!r} is not supported with sampling={str(sampling)!r}: use {usable}."
        )


def require_whole_blocks(sampling: Sampling, strategy: Strategy, unit: Unit) -> None:
    """Raise for a partition unless each block is clipped as a whole.

    The subsampling operator C_p replaces the drawn unit by another *unit*. In a partition another *block* replaces the
    drawn one. If blocks are clipped as a whole, this changes the sum by one sensitivity, and C_p holds. If records or
    users are clipped one by one, it changes the sum by one sensitivity for each member of a block: the drawn block can
    be recognised, and delta(epsilon) of a step is p delta_Gauss(epsilon).
    """
    if sampling is not Sampling.PARTITION or (strategy.clips_whole_blocks and unit is Unit.RECORD):
        return
    what = (
        f"{type(strategy).__name__}, which clips single records"
        if unit is Unit.RECORD
        else "group=, which clips each user alone"
    )
    raise ConfigurationError(
        f"sampling='partition' is not possible with {what}: the sum may reveal which block was drawn, so the random "
        "draw gives no amplification. Use sampling='fixed-size' or 'shuffled'. (Batch(max_norm=...) without group= "
        "clips each block as a whole and supports a partition.)"
    )


def noise_kind_of(noise: object) -> str:
    """The kind of noise. Raises if its optional package is missing."""
    kind: str = one_of("noise", noise, ("standard", "secure"))
    if kind == "secure":
        require_cipher()
    return kind


def planned_steps(epochs: float | None, steps: int | None, scheme: Scheme) -> int | None:
    """The number of steps that the noise is calibrated for."""
    if epochs is not None and steps is not None:
        raise ConfigurationError("Give epochs or steps, not both.")
    if epochs is not None:
        return math.ceil(number("epochs", epochs, above=0) * scheme.steps_per_epoch)
    return None if steps is None else whole("steps", steps, least=1)


def delta_of(delta: float | None, epsilon: float | None, size: int) -> float:
    """delta: as given, or well below 1/N if only a noise multiplier was given."""
    if delta is None:
        if epsilon is not None:
            raise ConfigurationError("epsilon needs delta: give both, for instance delta=1e-5.")
        return min(1e-5, 0.1 / size)
    delta = number("delta", delta, above=0, below=1)
    if delta >= 1 / size:
        warn(
            f"delta={delta:g} is not below 1/N={1 / size:g}: a mechanism that publishes a random record "
            "satisfies such a delta. Choose delta well below 1/N."
        )
    return delta
