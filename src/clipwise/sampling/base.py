"""The base class of sampling schemes.

Only schemes make events, so the accounting matches the sampling. An index is one unit of the guarantee: a record or a
user.

A draw is a pure function of secrets, so a batch that was drawn but not released can be drawn again. The drawn indices
are secret, and so is the realised batch size of Poisson sampling.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from clipwise.privacy import SUPPORTED, Adjacency, Event, Sampling, Unit
from clipwise.validation.arguments import whole

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Scheme(ABC):
    """A sampling scheme. All of its numbers are public.

    Args:
        dataset_size: N, the number of units.
    """

    sampling: ClassVar[Sampling]
    draws_by_microbatches: ClassVar[bool] = False  # whether the draw depends on the number of microbatches
    dataset_size: int

    def __post_init__(self) -> None:
        whole("dataset_size", self.dataset_size, least=1)

    @classmethod
    @abstractmethod
    def make(cls, dataset_size: int, batch_size: Any, sample_rate: Any, **own: Any) -> Scheme:
        """Make a scheme from the arguments of `make_scheme`. All but `Full` need exactly one of the two sizes."""

    if TYPE_CHECKING:  # a field of some schemes and a property of others

        @property
        def sample_rate(self) -> float:
            """The probability that a given unit is in the batch of a given step."""

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int:
        """The number of steps in which a unit is drawn about once."""

    @property
    @abstractmethod
    def expected_size(self) -> float:
        """L, the expected batch size: the constant divisor of a sum for every realised batch size."""

    @property
    @abstractmethod
    def largest_size(self) -> int:
        """The largest possible batch size. A random draw hardly ever reaches it."""

    @abstractmethod
    def draw(self, step_secret: bytes, epoch_secret: bytes, slot: int) -> Indices:
        """The sorted indices of a step's batch; `slot` is the index of the step in its epoch."""

    @property
    def period(self) -> int:
        """The number of steps in which each unit takes part exactly once; 1 if there is none."""
        return 1

    @property
    def block_size(self) -> int | None:
        """The number of units in a block, if whole blocks are drawn; None if units are drawn."""
        return None

    @property
    def has_random_size(self) -> bool:
        """Whether the batch size is random."""
        return False

    @property
    def excess(self) -> float:
        """The probability that a batch is truncated."""
        return 0.0

    def event(self, noise_multiplier: float, adjacency: Adjacency | None = None, unit: Unit = Unit.RECORD) -> Event:
        """The event of one step of this scheme; by default with the scheme's first supported adjacency."""
        return Event(
            sampling=self.sampling,
            adjacency=SUPPORTED[self.sampling][0] if adjacency is None else adjacency,
            unit=unit,
            noise_multiplier=noise_multiplier,
            sample_rate=self.sample_rate,
            period=self.period,
            excess=self.excess,
        )
