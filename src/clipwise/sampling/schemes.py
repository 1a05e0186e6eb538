"""How a batch is drawn: the public numbers of a scheme, its draws, and the event of one step.

A scheme is the only maker of events, so that what is accounted is what ran. An index stands for one
unit of the guarantee: `dataset_size` counts records, or whatever the data set's items are.

A draw is a pure function of secrets that the caller owns, so a batch that was drawn but not released
can be drawn again. Which indices came out, and for Poisson sampling how many, is secret.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from numbers import Real
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from clipwise.accounting.truncation import default_limit, excess
from clipwise.errors import ConfigurationError, StepError
from clipwise.privacy import SUPPORTED, Adjacency, Event, Sampling, Unit

Indices = NDArray[np.int64]

# What they draw depends on how many mini-sets a batch has.
DRAWN_BY_MINI_SETS = (Sampling.PARTITION, Sampling.FIXED_SIZE)


class Scheme(Protocol):
    """What every scheme offers; all its numbers are public."""

    sampling: ClassVar[Sampling]

    @property
    def dataset_size(self) -> int:
        """N, the number of units."""

    @property
    def sample_rate(self) -> float:
        """The probability that a given unit is in the batch of a given step."""

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps after which a unit has been drawn about once."""

    @property
    def expected_size(self) -> float:
        """L, the mean size of a batch: the constant that a sum is divided by, whatever was drawn."""

    @property
    def largest_size(self) -> int:
        """The largest possible size of a batch. A random draw hardly ever reaches it."""

    @property
    def period(self) -> int:
        """The number of steps in which each unit takes part exactly once; 1 where there is no such."""

    @property
    def has_random_size(self) -> bool:
        """Whether the size of a batch is left to chance."""

    @property
    def excess(self) -> float:
        """The probability that more units are drawn than a batch may hold, and the batch is cut."""

    def event(
        self, noise_multiplier: float, adjacency: Adjacency | None = None, unit: Unit = Unit.RECORD
    ) -> Event:
        """The event of one step that was drawn by this scheme."""

    def draw(self, step_secret: bytes, epoch_secret: bytes, slot: int) -> Indices:
        """The sorted indices of a step's batch; `slot` is the step's place in its epoch, from 0."""


class _Steps:
    """What the schemes share: each step is one event, and by default stands on its own."""

    @property
    def period(self) -> int:
        """The number of steps in which each unit takes part exactly once; 1 where there is no such."""
        return 1

    @property
    def has_random_size(self: Scheme) -> bool:
        """Only where every unit has a coin of its own."""
        return self.sampling in (Sampling.POISSON, Sampling.TRUNCATED_POISSON)

    @property
    def excess(self) -> float:
        """The probability that a draw is cut; 0 where none is."""
        return 0.0

    def event(
        self: Scheme, noise_multiplier: float, adjacency: Adjacency | None = None, unit: Unit = Unit.RECORD
    ) -> Event:
        """The event of one step; without `adjacency`, under the scheme's default one."""
        return Event(
            sampling=self.sampling,
            adjacency=SUPPORTED[self.sampling][0] if adjacency is None else adjacency,
            unit=unit,
            noise_multiplier=noise_multiplier,
            sample_rate=self.sample_rate,
            period=self.period,
            excess=self.excess,
        )


@dataclass(frozen=True)
class Poisson(_Steps):
    """Each unit is in the batch with probability `sample_rate`, by a coin of its own."""

    sampling: ClassVar[Sampling] = Sampling.POISSON
    dataset_size: int
    sample_rate: float

    def __post_init__(self) -> None:
        whole("dataset_size", self.dataset_size, least=1)
        if not 0 < self.sample_rate <= 1:
            raise ConfigurationError("sample_rate must lie in (0, 1].")

    @property
    def steps_per_epoch(self) -> int:
        """ceil(1 / q), where q = B / N may have been rounded a little below the quotient."""
        return max(1, math.ceil((1 - 1e-12) / self.sample_rate))

    @property
    def expected_size(self) -> float:
        """L = q N."""
        return self.sample_rate * self.dataset_size

    @property
    def largest_size(self) -> int:
        """N: every unit may be drawn."""
        return self.dataset_size

    def draw(self, step_secret: bytes, epoch_secret: bytes, slot: int) -> Indices:
        """A subset, possibly empty: an empty batch is a step like any other.

        N independent coins give a set A with probability q^|A| (1-q)^(N-|A|), which depends on |A|
        alone. So the size is Binomial(N, q) and, given the size, every subset of it is equally likely:
        drawing first the one and then the other is the same law, at the price of the batch and not of N.
        """
        random = _generator(step_secret)
        return _subset(random, self.dataset_size, int(random.binomial(self.dataset_size, self.sample_rate)))


@dataclass(frozen=True)
class TruncatedPoisson(Poisson):
    """A Poisson draw, of which a uniform subset of `max_batch_size` is kept if it is larger.

    For where memory is limited. That a batch was cut is as secret as its size. By default the limit is so
    high that cutting costs nothing: about 9.5 standard deviations above the mean.
    """

    sampling: ClassVar[Sampling] = Sampling.TRUNCATED_POISSON
    max_batch_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("max_batch_size", self.max_batch_size, least=1)
        if self.max_batch_size < self.expected_size:
            raise ConfigurationError(
                f"max_batch_size={self.max_batch_size} is below the expected batch size {self.expected_size:g}: most "
                f"batches would be cut. Leave it out, or give {default_limit(self.dataset_size, self.sample_rate)} "
                "or a little less."
            )

    @property
    def largest_size(self) -> int:
        """The limit, unless the data set is smaller."""
        return min(self.max_batch_size, self.dataset_size)

    @cached_property
    def excess(self) -> float:
        """P[Binomial(N, q) > max_batch_size], rounded up."""
        return excess(self.dataset_size, self.sample_rate, self.max_batch_size)

    def draw(self, step_secret: bytes, epoch_secret: bytes, slot: int) -> Indices:
        """As `Poisson` draws. A uniform subset of a uniform subset is uniform, so it is enough to cut the size."""
        random = _generator(step_secret)
        size = int(random.binomial(self.dataset_size, self.sample_rate))
        return _subset(random, self.dataset_size, min(size, self.max_batch_size))


@dataclass(frozen=True)
class _OfBatchSize(_Steps):
    """A scheme whose number of records a step is fixed beforehand."""

    dataset_size: int
    batch_size: int

    def __post_init__(self) -> None:
        whole("dataset_size", self.dataset_size, least=1)
        whole("batch_size", self.batch_size, least=1)
        if self.batch_size > self.dataset_size:
            raise ConfigurationError(
                f"batch_size={self.batch_size} must not be larger than the data set, which has {self.dataset_size} "
                "records (users, with group=)."
            )

    @property
    def steps_per_epoch(self) -> int:
        """ceil(N / B)."""
        return -(-self.dataset_size // self.batch_size)

    @property
    def largest_size(self) -> int:
        """B."""
        return self.batch_size


@dataclass(frozen=True)
class FixedSize(_OfBatchSize):
    """A fresh uniform subset of `batch_size` units in each step.

    With k = `mini_sets` it is a uniform subset of b = B / k units of each class j, j + k, j + 2k, ... of indices.
    For amplification, a unit that is drawn is compared with another one that stands in for it. Drawn from the
    whole, that one could belong to another mini-set, and two mini-sets would move where the bound is for one.
    """

    sampling: ClassVar[Sampling] = Sampling.FIXED_SIZE
    mini_sets: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_equal_mini_sets(self.batch_size, self.mini_sets)

    @property
    def sample_rate(self) -> float:
        """b over the size of the smallest class; B / N for a single one."""
        return (self.batch_size // self.mini_sets) / (self.dataset_size // self.mini_sets)

    @property
    def expected_size(self) -> float:
        """L = B."""
        return float(self.batch_size)

    def draw(self, step_secret: bytes, epoch_secret: bytes, slot: int) -> Indices:
        """Each subset of b units of a class with equal probability, independently of the other classes."""
        random, k = _generator(step_secret), self.mini_sets
        if k == 1:
            return _subset(random, self.dataset_size, self.batch_size)
        sizes = [len(range(j, self.dataset_size, k)) for j in range(k)]
        drawn = [j + k * _subset(random, size, self.batch_size // k) for j, size in enumerate(sizes)]
        return np.sort(np.concatenate(drawn))


@dataclass(frozen=True)
class Partition(_OfBatchSize):
    """A uniform choice, in each step, of `mini_sets` blocks of a partition into blocks of B / mini_sets units.

    The blocks are the units 0..b-1, b..2b-1, and so on: they depend on positions alone. When b does not
    divide N the last block is shorter. A unit changes one block only. If each block is clipped as a whole, choosing k
    of n blocks is choosing k of n units, and the subsampling operator at rate k / n covers it. If units are clipped one
    by one it does not: `make_private` refuses that.
    """

    sampling: ClassVar[Sampling] = Sampling.PARTITION
    mini_sets: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_equal_mini_sets(self.batch_size, self.mini_sets)

    @property
    def mini_set_size(self) -> int:
        """b = B / mini_sets."""
        return self.batch_size // self.mini_sets

    @property
    def blocks(self) -> int:
        """The number of blocks, n = ceil(N / b)."""
        return -(-self.dataset_size // self.mini_set_size)

    @property
    def sample_rate(self) -> float:
        """k / n."""
        return self.mini_sets / self.blocks

    @property
    def expected_size(self) -> float:
        """L = k N / n."""
        return self.mini_sets * self.dataset_size / self.blocks

    def draw(self, step_secret: bytes, epoch_secret: bytes, slot: int) -> Indices:
        """The indices of the blocks chosen."""
        random, size = _generator(step_secret), self.mini_set_size
        if self.mini_sets == 1:
            chosen = random.integers(self.blocks, size=1)
        else:
            chosen = _subset(random, self.blocks, self.mini_sets)
        units = (chosen[:, None] * size + np.arange(size)).ravel()
        return units[units < self.dataset_size].astype(np.int64)


@dataclass(frozen=True)
class Shuffled(_OfBatchSize):
    """Each unit once an epoch, in a random order: what ordinary training does.

    When B does not divide N the last batch of an epoch is shorter. No amplification is claimed.
    """

    sampling: ClassVar[Sampling] = Sampling.SHUFFLED

    @property
    def period(self) -> int:
        """The number of slots of an epoch, ceil(N / B)."""
        return self.steps_per_epoch

    @property
    def sample_rate(self) -> float:
        """1 / period."""
        return 1 / self.period

    @property
    def expected_size(self) -> float:
        """L = N / period."""
        return self.dataset_size / self.period

    def draw(self, step_secret: bytes, epoch_secret: bytes, slot: int) -> Indices:
        """The slot's piece of the epoch's order; the secret of the step plays no part."""
        if not 0 <= slot < self.period:
            raise StepError(f"slot must lie from 0 to {self.period - 1}, the last slot of an epoch.")
        first = slot * self.batch_size
        return np.sort(_order(epoch_secret, self.dataset_size)[first : first + self.batch_size])


@dataclass(frozen=True)
class Full(_Steps):
    """Every unit in every step."""

    sampling: ClassVar[Sampling] = Sampling.FULL
    dataset_size: int

    def __post_init__(self) -> None:
        whole("dataset_size", self.dataset_size, least=1)

    @property
    def sample_rate(self) -> float:
        """1: nothing is left to chance."""
        return 1.0

    @property
    def steps_per_epoch(self) -> int:
        """1: a step is an epoch."""
        return 1

    @property
    def expected_size(self) -> float:
        """L = N."""
        return float(self.dataset_size)

    @property
    def largest_size(self) -> int:
        """N."""
        return self.dataset_size

    def draw(self, step_secret: bytes, epoch_secret: bytes, slot: int) -> Indices:
        """All indices."""
        return np.arange(self.dataset_size, dtype=np.int64)


def make_scheme(
    sampling: str | Sampling,
    dataset_size: int,
    batch_size: int | None = None,
    sample_rate: float | None = None,
    *,
    max_batch_size: int | None = None,
    mini_sets: int = 1,
) -> Scheme:
    """The scheme of that name.

    Args:
        sampling: 'poisson', 'truncated-poisson', 'fixed-size', 'partition', 'shuffled' or 'full'.
        dataset_size: N, the number of units; public.
        batch_size: B; for 'poisson' the expected size, q = B / N. 'full' takes none.
        sample_rate: q, in place of `batch_size`, for 'poisson' and 'truncated-poisson' only.
        max_batch_size: for 'truncated-poisson', the most units of a batch. By default so many that cutting
            costs nothing.
        mini_sets: for 'partition', how many blocks make up a batch; for 'fixed-size', how many classes of indices
            it has as many units of.
    """
    try:
        kind = Sampling(sampling)
    except ValueError:
        names = ", ".join(repr(str(s)) for s in Sampling)
        raise ConfigurationError(f"sampling={sampling!r} is not known: use one of {names}.") from None
    dataset_size = whole("dataset_size", dataset_size, least=1)
    if max_batch_size is not None and kind is not Sampling.TRUNCATED_POISSON:
        raise ConfigurationError("max_batch_size goes with sampling='truncated-poisson' only: leave it out.")
    if mini_sets != 1 and kind not in DRAWN_BY_MINI_SETS:
        raise ConfigurationError(
            "mini_sets goes with sampling='partition' or 'fixed-size' only, whose draws depend on it: leave it out."
        )
    if kind is Sampling.FULL:
        if batch_size is not None or sample_rate is not None:
            raise ConfigurationError("sampling='full' takes every unit: give no batch_size or sample_rate.")
        return Full(dataset_size)
    if (batch_size is None) == (sample_rate is None):
        raise ConfigurationError("Give exactly one of batch_size and sample_rate.")
    if kind in (Sampling.POISSON, Sampling.TRUNCATED_POISSON):
        if batch_size is not None:
            sample_rate = FixedSize(dataset_size, whole("batch_size", batch_size, least=1)).sample_rate
        given: object = sample_rate  # whatever its type promises
        if isinstance(given, bool) or not isinstance(given, Real):
            raise ConfigurationError(f"sample_rate must be a number in (0, 1], not {sample_rate!r}.")
        poisson = Poisson(dataset_size, float(sample_rate or 0.0))
        if kind is Sampling.POISSON:
            return poisson
        limit = default_limit(dataset_size, poisson.sample_rate) if max_batch_size is None else max_batch_size
        return TruncatedPoisson(dataset_size, poisson.sample_rate, limit)
    if batch_size is None:
        raise ConfigurationError(
            f"sampling={str(kind)!r} needs a whole number of records: give batch_size, not sample_rate."
        )
    batch_size = whole("batch_size", batch_size, least=1)
    if kind is Sampling.FIXED_SIZE:
        return FixedSize(dataset_size, batch_size, whole("mini_sets", mini_sets, least=1))
    if kind is Sampling.PARTITION:
        return Partition(dataset_size, batch_size, whole("mini_sets", mini_sets, least=1))
    return Shuffled(dataset_size, batch_size)


def _require_equal_mini_sets(batch_size: int, mini_sets: int) -> None:
    whole("mini_sets", mini_sets, least=1)
    if batch_size % mini_sets:
        raise ConfigurationError(
            f"mini_sets={mini_sets} must divide batch_size={batch_size}: mini-sets are equally large."
        )


def whole(name: str, value: int, least: int) -> int:
    """The argument as a plain int; refused unless it is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ConfigurationError(f"{name} must be a whole number of at least {least}.")
    return int(value)


def _subset(random: np.random.Generator, population: int, size: int) -> Indices:
    """A uniform subset, sorted: order within a batch means nothing, and memory is read in one direction."""
    return np.sort(random.choice(population, size, replace=False, shuffle=False))


@lru_cache(maxsize=2)
def _order(epoch_secret: bytes, size: int) -> Indices:
    """A uniform order of `size` units, made once for all slots of an epoch.

    An epoch may be continued by another process, perhaps under another version of numpy, and a unit
    takes part once only if that process finds the same order. numpy promises the words of a bit
    generator and not what `Generator` makes of them, so the words themselves are ranked. Two of them
    are equal with probability below N^2 / 2^65, and then only the choice between those two units is not fair.
    """
    order = np.argsort(_bits(epoch_secret).random_raw(size), kind="stable")
    order.setflags(write=False)
    return order


def _generator(secret: bytes) -> np.random.Generator:
    return np.random.Generator(_bits(secret))


def _bits(secret: bytes) -> np.random.Philox:
    digest = blake2b(secret, digest_size=16, person=b"clipwise.draw").digest()
    return np.random.Philox(key=int.from_bytes(digest, "little"))
