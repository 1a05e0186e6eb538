"""The ledger of a run over several ranks.

Rank 0 has the ledger. It makes a charge durable and then notifies the other ranks, so no rank computes a noised value
that is not on disk. Every other rank has a copy in memory, which counts the same releases: its statement is the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from clipwise.distributed.ranks import OneRank
from clipwise.errors import ConfigurationError
from clipwise.ledger.file_format import LedgerState, Record
from clipwise.ledger.ledger import Ledger

# By the id of the ledger, so that runs that share a ledger on rank 0 share its copy.
_COPIES: WeakValueDictionary[str, FollowerLedger] = WeakValueDictionary()


class FollowerLedger(Ledger):
    """The copy of rank 0's ledger on another rank, in memory."""

    def __init__(self, state: LedgerState, existing: bool) -> None:
        super().__init__(state)
        self.existing = existing

    def require_in_place(self) -> None:
        """A copy in memory is always in place."""

    def _append(self, record: Record) -> None:
        self._state.apply(json.loads(json.dumps(record)))

    def _release(self) -> None:
        pass


def opened(ranks: OneRank, given: Any, make: Callable[[], Ledger]) -> Ledger:
    """The ledger that `make` opens on rank 0; a copy of it on every other rank."""
    if not ranks.is_first and isinstance(given, Ledger):
        raise ConfigurationError(
            "ledger= is an open ledger on a rank other than 0. Rank 0 writes the ledger: give a path, or "
            "FileLedger(...) on rank 0 and None on the others."
        )
    kept: list[Ledger] = []

    def shared() -> tuple[LedgerState, bool]:
        kept.append(make())
        return kept[0]._state, kept[0].existing

    if ranks.count == 1:
        return make()
    state, existing = ranks.from_rank_0(shared)
    if kept:
        return kept[0]
    copy = _COPIES.get(state.run)
    if copy is None or copy.is_closed:
        copy = _COPIES[state.run] = FollowerLedger(state, existing)
    return copy


def exchanged(ranks: OneRank, note: Any, check: int) -> list[Any]:
    """The notes of all ranks about a step; None where there is none.

    Called on rank 0 after its charge is durable, and on the others before they count it.
    """
    notes = ranks.exchange("step", json.dumps(note).encode() if note else b"", check)
    return [json.loads(each) if each else None for each in notes]
