"""What every sampling scheme offers, and the randomness of a draw.

A scheme is the only maker of events, so that what is accounted is what ran. An index stands for one
unit of the guarantee: `dataset_size` counts records, or whatever the data set's items are.

A draw is a pure function of secrets that the caller owns, so a batch that was drawn but not released
can be drawn again. Which indices came out, and for Poisson sampling how many, is secret.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from clipwise.privacy import SUPPORTED, Adjacency, Event, Sampling, Unit
from clipwise.validation.arguments import whole

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Scheme(ABC):
    """What every scheme offers; all its numbers are public.

    Args:
        dataset_size: N, the number of units.
    """

    sampling: ClassVar[Sampling]
    draws_by_mini_sets: ClassVar[bool] = False  # what is drawn depends on the number of mini-sets of a batch
    dataset_size: int

    def __post_init__(self) -> None:
        whole("dataset_size", self.dataset_size, least=1)

    @classmethod
    @abstractmethod
    def make(cls, dataset_size: int, batch_size: Any, sample_rate: Any, **own: Any) -> Scheme:
        """From the arguments of `make_scheme`; exactly one of the two sizes is needed, except by `Full`."""

    if TYPE_CHECKING:  # a field of some schemes and a property of others

        @property
        def sample_rate(self) -> float:
            """The probability that a given unit is in the batch of a given step."""

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int:
        """The number of steps after which a unit has been drawn about once."""

    @property
    @abstractmethod
    def expected_size(self) -> float:
        """L, the mean size of a batch: the constant that a sum is divided by, whatever was drawn."""

    @property
    @abstractmethod
    def largest_size(self) -> int:
        """The largest possible size of a batch. A random draw hardly ever reaches it."""

    @abstractmethod
    def draw(self, step_secret: bytes, epoch_secret: bytes, slot: int) -> Indices:
        """The sorted indices of a step's batch; `slot` is the step's place in its epoch, from 0."""

    @property
    def period(self) -> int:
        """The number of steps in which each unit takes part exactly once; 1 where there is no such."""
        return 1

    @property
    def block_size(self) -> int | None:
        """The number of units in a block, where whole blocks are drawn; None where units are."""
        return None

    @property
    def has_random_size(self) -> bool:
        """Whether the size of a batch is random."""
        return False

    @property
    def excess(self) -> float:
        """The probability that more units are drawn than a batch may hold, and the batch is cut."""
        return 0.0

    def event(
        self, noise_multiplier: float, adjacency: Adjacency | None = None, unit: Unit = Unit.RECORD
    ) -> Event:
        """The event of one step that was drawn by this scheme; by default under the scheme's first adjacency."""
        return Event(
            sampling=self.sampling,
            adjacency=SUPPORTED[self.sampling][0] if adjacency is None else adjacency,
            unit=unit,
            noise_multiplier=noise_multiplier,
            sample_rate=self.sample_rate,
            period=self.period,
            excess=self.excess,
        )


def subset(random: np.random.Generator, population: int, size: int) -> Indices:
    """A uniform subset, sorted: order within a batch means nothing, and memory is read in one direction."""
    return np.sort(random.choice(population, size, replace=False, shuffle=False))


@lru_cache(maxsize=2)
def epoch_order(epoch_secret: bytes, size: int) -> Indices:
    """A uniform order of `size` units, made once for all slots of an epoch.

    An epoch may be continued by another process, perhaps under another version of numpy, and a unit
    takes part once only if that process finds the same order. numpy promises the words of a bit
    generator and not what `Generator` makes of them, so the words themselves are ranked. Two of them
    are equal with probability below N^2 / 2^65, and then only the choice between those two units is not fair.
    """
    order = np.argsort(_bits(epoch_secret).random_raw(size), kind="stable")
    order.setflags(write=False)
    return order


def generator_of(secret: bytes) -> np.random.Generator:
    """The generator of a step's draw."""
    return np.random.Generator(_bits(secret))


def _bits(secret: bytes) -> np.random.Philox:
    digest = blake2b(secret, digest_size=16, person=b"clipwise.draw").digest()
    return np.random.Philox(key=int.from_bytes(digest, "little"))
