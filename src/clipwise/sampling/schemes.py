"""The sampling schemes, which draw the batch of a step.

To add one: add it to `privacy.Sampling`, with its adjacencies (`SUPPORTED`) and its dominating pair (`AMPLIFICATION`),
write its class here, and add it to `SCHEMES`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any, ClassVar

import numpy as np

from clipwise.accounting.truncation import default_limit, excess
from clipwise.errors import ConfigurationError, StepError
from clipwise.privacy import Sampling
from clipwise.sampling.base import Indices, Scheme
from clipwise.validation.arguments import number, one_of, whole, with_plain_numbers


@dataclass(frozen=True)
class Poisson(Scheme):
    """Poisson subsampling: each unit is included independently with probability `sample_rate`."""

    sampling: ClassVar[Sampling] = Sampling.POISSON
    sample_rate: float

    def __post_init__(self) -> None:
        super().__post_init__()
        number("sample_rate", self.sample_rate, above=0, most=1)

    @classmethod
    def make(cls, dataset_size: int, batch_size: Any, sample_rate: Any, **own: Any) -> Poisson:
        _require_one_size(batch_size, sample_rate)
        if batch_size is not None:  # FixedSize checks the size
            sample_rate = FixedSize.make(dataset_size, batch_size, None).sample_rate
        return Poisson(dataset_size, number("sample_rate", sample_rate, above=0, most=1))

    @property
    def has_random_size(self) -> bool:
        return True

    @property
    def steps_per_epoch(self) -> int:
        """ceil(1 / q), with a tolerance for the rounding of q = B / N."""
        return max(1, math.ceil((1 - 1e-12) / self.sample_rate))

    @property
    def expected_size(self) -> float:
        return self.sample_rate * self.dataset_size

    @property
    def largest_size(self) -> int:
        return self.dataset_size

    def draw(self, step_secret: bytes, epoch_secret: bytes, slot: int) -> Indices:
        """A subset, possibly empty. An empty batch counts as a step.

        N independent inclusions give a set A with probability q^|A| (1-q)^(N-|A|), which depends on |A| alone. So the
        size is Binomial(N, q), and all subsets of that size are equally likely: drawing the size and then the subset
        has the same law, in time O(batch) instead of O(N). A uniform subset of a uniform subset is uniform, so
        truncating the size truncates the batch.
        """
        random = _generator_of(step_secret)
        size = int(random.binomial(self.dataset_size, self.sample_rate))
        return subset(random, self.dataset_size, min(size, self.largest_size))


@dataclass(frozen=True)
class TruncatedPoisson(Poisson):
    """A Poisson draw, truncated to a uniform subset of `max_batch_size` units if it is larger.

    It limits the memory of a step. Whether a batch was truncated is secret. By default truncation costs no privacy.
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

    @classmethod
    def make(cls, dataset_size: int, batch_size: Any, sample_rate: Any, **own: Any) -> TruncatedPoisson:
        rate = Poisson.make(dataset_size, batch_size, sample_rate).sample_rate
        limit = own.get("max_batch_size")
        return cls(dataset_size, rate, max(1, default_limit(dataset_size, rate)) if limit is None else limit)

    @property
    def largest_size(self) -> int:
        return min(self.max_batch_size, self.dataset_size)

    @cached_property
    def excess(self) -> float:
        """P[Binomial(N, q) > max_batch_size], rounded up."""
        return excess(self.dataset_size, self.sample_rate, self.max_batch_size)


@dataclass(frozen=True)
class _OfBatchSize(Scheme):
    batch_size: int

    def __post_init__(self) -> None:
        with_plain_numbers(self)
        super().__post_init__()
        whole("batch_size", self.batch_size, least=1)
        if self.batch_size > self.dataset_size:
            raise ConfigurationError(
                f"batch_size={self.batch_size} must not be larger than the data set, which has {self.dataset_size} "
                "records (users, with group=)."
            )

    @classmethod
    def make(cls, dataset_size: int, batch_size: Any, sample_rate: Any, **own: Any) -> _OfBatchSize:
        _require_one_size(batch_size, sample_rate)
        if batch_size is None:
            raise ConfigurationError(
                f"sampling={str(cls.sampling)!r} needs a whole number of records: give batch_size, not sample_rate."
            )
        own = {name: own[name] for name in own.keys() & cls.__dataclass_fields__}
        return cls(dataset_size, batch_size, **own)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.dataset_size // self.batch_size)  # ceil(N / B)

    @property
    def largest_size(self) -> int:
        return self.batch_size


@dataclass(frozen=True)
class _OfMicrobatches(_OfBatchSize):
    """A scheme whose draw depends on the number k of equally large microbatches of a batch."""

    draws_by_microbatches: ClassVar[bool] = True
    microbatches: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("microbatches", self.microbatches, least=1)
        if self.batch_size % self.microbatches:
            raise ConfigurationError(
                f"microbatches={self.microbatches} must divide batch_size={self.batch_size}: all have the same size."
            )

    @property
    def microbatch_size(self) -> int:
        """b = B / microbatches."""
        return self.batch_size // self.microbatches


@dataclass(frozen=True)
class FixedSize(_OfMicrobatches):
    """A fresh uniform subset of `batch_size` units in each step.

    With k = `microbatches` it is a uniform subset of b = B / k units of each class j, j + k, j + 2k, ... of indices.
    The amplification proof replaces a drawn unit by another one. Drawn from all units, that one could belong to another
    microbatch. Then two microbatches would change, but the sensitivity is that of one.
    """

    sampling: ClassVar[Sampling] = Sampling.FIXED_SIZE

    @property
    def sample_rate(self) -> float:
        """b over the size of the smallest class; B / N for a single class."""
        return self.microbatch_size / (self.dataset_size // self.microbatches)

    @property
    def expected_size(self) -> float:
        return float(self.batch_size)

    def draw(self, step_secret: bytes, epoch_secret: bytes, slot: int) -> Indices:
        """A uniform subset of b units of each class, independently of the other classes."""
        random, k = _generator_of(step_secret), self.microbatches
        if k == 1:
            return subset(random, self.dataset_size, self.batch_size)
        sizes = [len(range(j, self.dataset_size, k)) for j in range(k)]
        drawn = [j + k * subset(random, size, self.microbatch_size) for j, size in enumerate(sizes)]
        return np.sort(np.concatenate(drawn))


@dataclass(frozen=True)
class Partition(_OfMicrobatches):
    """A uniform choice, in each step, of `microbatches` blocks of a partition into blocks of B / microbatches units.

    The blocks are the units 0..b-1, b..2b-1, and so on; the last block is shorter if b does not divide N. A unit
    changes one block only. If each block is clipped as a whole, choosing k of n blocks is equivalent to choosing k of n
    units, and the subsampling operator at rate k / n applies. If units are clipped one by one it does not apply, and
    `make_private` raises an error.
    """

    sampling: ClassVar[Sampling] = Sampling.PARTITION

    @property
    def block_size(self) -> int:
        return self.microbatch_size

    @property
    def blocks(self) -> int:
        return -(-self.dataset_size // self.block_size)  # n = ceil(N / b)

    @property
    def sample_rate(self) -> float:
        return self.microbatches / self.blocks

    @property
    def expected_size(self) -> float:
        return self.microbatches * self.dataset_size / self.blocks

    def draw(self, step_secret: bytes, epoch_secret: bytes, slot: int) -> Indices:
        random, size = _generator_of(step_secret), self.block_size
        if self.microbatches == 1:
            chosen = random.integers(self.blocks, size=1)
        else:
            chosen = subset(random, self.blocks, self.microbatches)
        units = (chosen[:, None] * size + np.arange(size)).ravel()
        return units[units < self.dataset_size].astype(np.int64)


@dataclass(frozen=True)
class Shuffled(_OfBatchSize):
    """Each unit once per epoch, in a random order, as in non-private training.

    If B does not divide N, the last batch of an epoch is shorter. No amplification is claimed.
    """

    sampling: ClassVar[Sampling] = Sampling.SHUFFLED

    @property
    def period(self) -> int:
        return self.steps_per_epoch

    @property
    def sample_rate(self) -> float:
        return 1 / self.period

    @property
    def expected_size(self) -> float:
        return self.dataset_size / self.period

    def draw(self, step_secret: bytes, epoch_secret: bytes, slot: int) -> Indices:
        if not 0 <= slot < self.period:
            raise StepError(f"slot must lie from 0 to {self.period - 1}, the last slot of an epoch.")
        first = slot * self.batch_size
        return np.sort(epoch_order(epoch_secret, self.dataset_size)[first : first + self.batch_size])


@dataclass(frozen=True)
class Full(Scheme):
    """Full batches: every unit in every step."""

    sampling: ClassVar[Sampling] = Sampling.FULL
    sample_rate: ClassVar[float] = 1.0
    steps_per_epoch: ClassVar[int] = 1

    @classmethod
    def make(cls, dataset_size: int, batch_size: Any, sample_rate: Any, **own: Any) -> Full:
        if batch_size is not None or sample_rate is not None:
            raise ConfigurationError("sampling='full' takes every unit: give no batch_size or sample_rate.")
        return cls(dataset_size)

    @property
    def expected_size(self) -> float:
        return float(self.dataset_size)

    @property
    def largest_size(self) -> int:
        return self.dataset_size

    def draw(self, step_secret: bytes, epoch_secret: bytes, slot: int) -> Indices:
        return np.arange(self.dataset_size, dtype=np.int64)


SCHEMES: dict[Sampling, type[Scheme]] = {
    scheme.sampling: scheme for scheme in (Poisson, TruncatedPoisson, FixedSize, Partition, Shuffled, Full)
}
DRAWN_BY_MICROBATCHES = tuple(sampling for sampling, scheme in SCHEMES.items() if scheme.draws_by_microbatches)


def make_scheme(
    sampling: str | Sampling,
    dataset_size: int,
    batch_size: int | None = None,
    sample_rate: float | None = None,
    *,
    max_batch_size: int | None = None,
    microbatches: int = 1,
) -> Scheme:
    """Make the scheme with this name.

    Args:
        sampling: 'poisson', 'truncated-poisson', 'fixed-size', 'partition', 'shuffled' or 'full'.
        dataset_size: N, the number of units; public.
        batch_size: B; for 'poisson' the expected size, q = B / N. 'full' takes none.
        sample_rate: q, in place of `batch_size`, for 'poisson' and 'truncated-poisson' only.
        max_batch_size: for 'truncated-poisson', the largest batch size. The default is so high that truncation costs
            no privacy.
        microbatches: for 'partition', the number of blocks in a batch; for 'fixed-size', the number of index classes.
    """
    scheme = SCHEMES[one_of("sampling", sampling, Sampling)]
    if max_batch_size is not None and scheme is not TruncatedPoisson:
        raise ConfigurationError("max_batch_size is for sampling='truncated-poisson' only: leave it out.")
    if microbatches != 1 and not scheme.draws_by_microbatches:
        raise ConfigurationError(
            f"microbatches={microbatches!r} is for sampling='partition' or 'fixed-size' only, whose draws depend on "
            "it: leave it out."
        )
    size = whole("dataset_size", dataset_size, least=1)
    return scheme.make(size, batch_size, sample_rate, max_batch_size=max_batch_size, microbatches=microbatches)


def subset(random: np.random.Generator, population: int, size: int) -> Indices:
    """A uniform subset, sorted so that memory is read in one direction."""
    return np.sort(random.choice(population, size, replace=False, shuffle=False))


@lru_cache(maxsize=2)
def epoch_order(epoch_secret: bytes, size: int) -> Indices:
    """A uniform order of `size` units, computed once per epoch.

    Another process, with another version of numpy, may continue an epoch, and must find the same order so that each
    unit takes part once. numpy guarantees the words of a bit generator but not the methods of `Generator`, so the words
    are ranked. Two words are equal with probability below N^2 / 2^65; then the order of these two units is not random.
    """
    order = np.argsort(_bits(epoch_secret).random_raw(size), kind="stable")
    order.setflags(write=False)
    return order


def _generator_of(secret: bytes) -> np.random.Generator:
    return np.random.Generator(_bits(secret))


def _bits(secret: bytes) -> np.random.Philox:
    digest = blake2b(secret, digest_size=16, person=b"clipwise.draw").digest()
    return np.random.Philox(key=int.from_bytes(digest, "little"))


def _require_one_size(batch_size: Any, sample_rate: Any) -> None:
    if (batch_size is None) == (sample_rate is None):
        raise ConfigurationError("Give exactly one of batch_size and sample_rate.")
