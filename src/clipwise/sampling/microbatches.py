"""Cuts the batch of a step into the pieces that the loader yields.

A microbatch (the "group" of the papers; the argument is `microbatches`) is a set of records whose mean gradient is
clipped as a whole.

For a sum over examples any cut is correct. The microbatch of a record must not depend on the draw: it depends on the
index of the record, on its block of the partition, or on its user. If batches were cut by position in the draw, one
record more would move others to another microbatch and change every clipped mean.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, MappingView, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from clipwise.errors import ConfigurationError
from clipwise.sampling.base import Indices, Scheme
from clipwise.validation.arguments import whole

_NO_RECORDS = np.empty(0, dtype=np.int64)


class Cut(ABC):
    """Maps the drawn units to the records of each piece. There is at least one piece."""

    may_be_empty: bool  # whether a piece may be empty although units were drawn

    @abstractmethod
    def __call__(self, drawn: Indices) -> list[Indices]:
        """The records of each piece."""

    def most_pieces(self, largest_size: int) -> int:
        """A public upper bound on the number of pieces, for batches of at most `largest_size` units."""
        return max(1, largest_size)

    def units(self, records: int) -> int:
        """The number of units that a scheme draws from, for a data set of so many records."""
        return records

    def of_rank(self, drawn: Indices, rank: int, ranks: int) -> list[Indices]:
        """The pieces of one of several ranks, which take turns. All ranks have the same number of pieces."""
        pieces = self(drawn)
        own = pieces[rank::ranks]
        return own + [_NO_RECORDS] * (-(-len(pieces) // ranks) - len(own))


@dataclass(frozen=True)
class BySize(Cut):
    """Nearly even pieces of at most `limit` records; one piece without a limit."""

    limit: int | None = None
    may_be_empty = False

    def __post_init__(self) -> None:
        if self.limit is not None:
            whole("max_physical_batch_size", self.limit, least=1)

    def __call__(self, drawn: Indices) -> list[Indices]:
        if self.limit is None or len(drawn) <= self.limit:
            return [drawn]
        return np.array_split(drawn, -(-len(drawn) // self.limit))

    def of_rank(self, drawn: Indices, rank: int, ranks: int) -> list[Indices]:
        """Every rank takes each `ranks`-th record of the draw, so that shares differ by one record at most."""
        largest = -(-len(drawn) // ranks)
        count = 1 if self.limit is None else max(1, -(-largest // self.limit))
        return np.array_split(drawn[rank::ranks], count)

    def most_pieces(self, largest_size: int) -> int:
        return 1 if self.limit is None else max(1, -(-largest_size // self.limit))


WHOLE = BySize()


@dataclass(frozen=True)
class ByIndex(Cut):
    """Record i is in microbatch i mod k. There are always k microbatches; some may be empty."""

    microbatches: int
    may_be_empty: bool = True

    def __call__(self, drawn: Indices) -> list[Indices]:
        microbatch = drawn % self.microbatches
        ends = np.cumsum(np.bincount(microbatch, minlength=self.microbatches))
        return np.split(drawn[np.argsort(microbatch, kind="stable")], ends[:-1])

    def most_pieces(self, largest_size: int) -> int:
        return self.microbatches


@dataclass(frozen=True)
class ByBlock(Cut):
    """The microbatches are the drawn blocks of a partition into blocks of `size` records."""

    size: int
    may_be_empty = False

    def __call__(self, drawn: Indices) -> list[Indices]:
        blocks = drawn // self.size
        return [drawn[blocks == b] for b in np.unique(blocks)]

    def most_pieces(self, largest_size: int) -> int:
        return -(-largest_size // self.size)


class ByUser(Cut):
    """All records of a user are one microbatch, and users are drawn. `ids` gives the owner of each record, in order.

    Users are numbered by their sorted ids and not by the order of their records: the records of one user must not
    change the number of another.
    """

    may_be_empty = False

    def __init__(self, ids: Iterable[Hashable]) -> None:
        records: dict[Hashable, list[int]] = {}
        for index, owner in enumerate(_listed(ids)):
            records.setdefault(owner, []).append(index)
        if not records:
            raise ConfigurationError("group is empty: give one user id for each record.")
        self._records = [np.array(records[owner], dtype=np.int64) for owner in _in_order(records)]
        self._count = sum(map(len, self._records))

    def __repr__(self) -> str:  # the ids are private
        return f"ByUser({len(self._records)} users)"

    def __call__(self, drawn: Indices) -> list[Indices]:
        return [self._records[user] for user in drawn] or [_NO_RECORDS]

    @property
    def users(self) -> int:
        """The number of users, which is public. The number of records of each user is secret."""
        return len(self._records)

    def units(self, records: int) -> int:
        """The number of users. Raises if there is not one id for each record."""
        if records != self._count:
            raise ConfigurationError("group must give one user id for each record of the data set, in its order.")
        return self.users

    def table(self) -> list[Any]:
        """The records of each user, for a digest. It is private."""
        return [records.tolist() for records in self._records]


def microbatches_of(scheme: Scheme, count: int) -> Cut:
    """The cut of a scheme's batches into `count` microbatches."""
    if scheme.block_size is not None:
        return ByBlock(scheme.block_size)
    return ByIndex(count, may_be_empty=count > 1 and not scheme.draws_by_microbatches)


def _listed(ids: Any) -> list[Hashable]:
    """The owner of each record."""
    dimensions = getattr(ids, "ndim", 1)  # a table iterates over its column names
    if dimensions != 1:
        raise ConfigurationError(f"group has {dimensions} dimensions: give one user id for each record.")
    if isinstance(ids, (torch.Tensor, np.ndarray)):
        ids = ids.tolist()
    if isinstance(ids, (str, bytes, Mapping, MappingView, Set)) or not isinstance(ids, Iterable):
        raise ConfigurationError(
            f"group is a {type(ids).__name__}: it holds no ids, or each key once and not in the order of the records, "
            "so each record would count as a separate user. Give a list with one user id for each record, in the data "
            "set's order: [owner[i] for i in range(n)] for n records."
        )
    found = list(ids)
    for owner in found:
        # A tensor is hashed by its identity.
        if not isinstance(owner, Hashable) or isinstance(owner, torch.Tensor):
            raise ConfigurationError(
                f"group: a user id must be a plain value such as a number or a text, not {type(owner).__name__}."
            )
        if owner is None or owner != owner:
            raise ConfigurationError(
                "group: a user id is missing (None or NaN). Every record needs the id of its user: give each such "
                "record its own id if it belongs to a user without other records, or leave it out."
            )
    return found


def _in_order(owners: Iterable[Hashable]) -> list[Hashable]:
    found: list[Any] = list(owners)
    try:
        return sorted(found)
    except TypeError:  # of several types
        return sorted(found, key=lambda owner: (type(owner).__qualname__, repr(owner)))
