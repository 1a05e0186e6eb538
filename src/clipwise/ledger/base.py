"""What has been released. A crash can make the ledger say too much, never too little.

A release is charged *before* any noised value becomes visible. So that a step need not wait for the
disk, one line reserves a block of releases, which is then used up without touching the file. A clean end
settles: it states how much of the last block was used. After any other end the whole block is spent.

Several runs may charge one ledger, one after the other or at the same time. Each has a tag of its own, a block of
its own and an entry of its own that grows; what they released adds up.
"""

from __future__ import annotations

import json
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from clipwise.errors import LedgerError
from clipwise.ledger.file_format import Book, Record, encode
from clipwise.privacy import Entry, Event

JSON: TypeAlias = "Mapping[str, JSON] | Sequence[JSON] | str | int | float | bool | None"
SomeLedger = TypeVar("SomeLedger", bound="Ledger")


class Limit(Protocol):
    """What decides whether a release may be charged. It is asked while the ledger is locked."""

    def allows(self, history: Sequence[Entry], plan: Mapping[str, JSON] | None) -> bool:
        """Whether the ledger may hold this history; `plan` is that of the ledger."""

    def refuse(self, history: Sequence[Entry]) -> NoReturn:
        """Raise an error that says why the history, which is not allowed, is not."""


@dataclass
class _Block:
    """The open reservation of a run, and how much of it is not used: that is in the book, but not yet charged."""

    event: Event
    left: int


class Ledger(ABC):
    """What has been released, in order. For one process, whose threads may share it."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._blocks: dict[str, _Block] = {}  # by run
        self._users: WeakValueDictionary[str, object] = WeakValueDictionary()  # who charges under which tag
        self._doubtful: set[str] = (
            set()
        )  # runs with a charge that may not have been released, not yet written down
        self._closed = False
        self._process = os.getpid()
        self._lock = threading.Lock()

    @property
    def run(self) -> str:
        """The id of the ledger, random hex."""
        return self._book.run

    @property
    def untagged(self) -> str:
        """The tag of releases that were charged without one: of the run that began or joined last."""
        return self._book.untagged

    @property
    def position(self) -> int:
        """How many releases have been charged, those found when the ledger was opened included."""
        with self._lock:
            return self._book.total - sum(block.left for block in self._blocks.values())

    @property
    def about(self) -> tuple[Mapping[str, JSON], ...]:
        """What runs said about themselves with `describe`, in order."""
        with self._lock:
            return tuple(self._book.about)

    @property
    def declared(self) -> tuple[tuple[str, str], ...]:
        """Kind and reason of every update that a user declared with `declare`, in order."""
        with self._lock:
            return tuple(self._book.declared)

    @property
    def plan(self) -> Mapping[str, JSON] | None:
        """The first plan that a run has described; None if no run had one.

        That is its `budget` and `delta`, the steps `planned`, and whether others had released before (`late`).
        """
        return self._book.plan

    @property
    def exact(self) -> bool:
        """Whether everything that is charged was released."""
        return self._book.exact and not self._doubtful

    def made(self, run: str) -> int:
        """How many releases have been charged by this run."""
        with self._lock:
            block = self._blocks.get(run)
            return self._book.counts.get(run, 0) - (block.left if block else 0)

    def history(self) -> list[Entry]:
        """The releases charged so far, run-length coded, never merged across runs or a restart."""
        with self._lock:
            return self._book.entries_with(self._unused())

    def require_allowed(self, limit: Limit, event: Event, run: str) -> None:
        """Raise what `charge` would raise because of the limit. It charges nothing."""
        with self._lock:
            self._require_allowed(limit, event, run)

    def charge(self, event: Event, run: str | None = None, limit: Limit | None = None) -> None:
        """Count one release of `event`: when this returns, no crash can undo it.

        Call it before any noised value becomes visible. If it raises, release nothing.

        Args:
            event: what is released.
            run: the tag of the run that releases it; by default `untagged`.
            limit: asked about all that the ledger then holds, also from other runs, before anything is charged.
        """
        with self._usable():
            run = self._book.untagged if run is None else run
            if limit is not None:
                self._require_allowed(limit, event, run)
            block = self._blocks.get(run)
            if block is None or not block.left or not (event is block.event or event == block.event):
                block = self._reserve(event, run, limit)
            block.left -= 1

    def doubt(self, run: str) -> None:
        """Say that what the run charged last may never have been released: the count is no longer exact."""
        self._doubtful.add(run)

    def describe(self, about: Mapping[str, JSON]) -> None:
        """Keep what a run says about itself: `about` is public, compared with nothing, and charges nothing."""
        with self._usable():
            told = json.loads(encode(about))
            if self._book.about[-1:] != [told]:
                self._append({"kind": "about", "about": told})

    def declare(self, run: str, kind: str, reason: str) -> None:
        """Keep that the user declared a change of the weights which no release of the run made. It is public."""
        with self._usable():
            self._append_for(run, {"kind": "declared", "update": kind, "reason": reason})

    def restart(self, run: str | None = None) -> None:
        """A new noise key of the run begins: what follows is not merged with what it released before."""
        with self._usable():
            run = self._book.untagged if run is None else run
            if self._book.is_growing(run):
                self._give_back(run)
                self._append_for(run, {"kind": "restart"})

    def import_history(
        self, entries: Sequence[Entry], *, exact: bool = True, plan: Mapping[str, JSON] | None = None
    ) -> None:
        """Charge, all or nothing, what a run released before it goes on in this empty ledger.

        The entries stay as they are, and nothing that follows is merged with them: this ledger was not
        there, so it cannot know whether the same noise key goes on.

        Args:
            entries: the releases, each with the tag of its run.
            exact: whether all of them were released.
            plan: `plan` of the ledger that they come from.
        """
        with self._usable():
            if self._book.total:
                raise LedgerError(
                    "import_history: this ledger already holds releases. Continue the checkpoint with a "
                    "new ledger, or with the one that it was made with."
                )
            if any(entry.count < 1 for entry in entries):
                raise LedgerError("import_history: every entry must count at least one release.")
            if entries:
                listed = [[e.event.to_dict(), e.count, e.run or self._book.untagged] for e in entries]
                self._append(
                    {
                        "kind": "import",
                        "entries": listed,
                        "exact": bool(exact),
                        "plan": None if plan is None else json.loads(encode(plan)),
                    }
                )

    def enter(self, run: str, user: object) -> bool:
        """Let `user` charge under the tag `run`; False if somebody else does."""
        with self._usable():
            return self._users.setdefault(run, user) is user

    def leave(self, run: str, user: object, verified: bool | None = None) -> None:
        """End the use of a tag: its unused reservation is given back. The ledger is closed behind the last user.

        Args:
            run: the tag.
            user: who charged under it.
            verified: whether the model's weights were then what the releases of the run had left.
        """
        try:
            with self._lock:
                if self._users.get(run) is user:
                    del self._users[run]
                if not self._closed and os.getpid() == self._process:
                    self.require_in_place()
                    self._settle(run)
                    if verified is not None:
                        self._append_for(run, {"kind": "closed", "verified": verified})
        finally:
            if not self._users:
                self.close()

    def close(self) -> None:
        """End cleanly: what was reserved and not used is given back. Later charges are refused."""
        with self._lock:
            try:
                if not self._closed and os.getpid() == self._process:
                    self.require_in_place()
                    for run in list(self._book.open):
                        self._settle(run)
            finally:
                if not self._closed and os.getpid() == self._process:
                    self._release()
                self._closed = True

    @abstractmethod
    def require_in_place(self) -> None:
        """Raise LedgerError if what was written can no longer be found where it was written to."""

    def __enter__(self: SomeLedger) -> SomeLedger:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _usable(self) -> threading.Lock:
        """The lock to hold while writing, unless nothing may be written."""
        if os.getpid() != self._process:
            raise LedgerError(
                "this ledger was opened by another process, and a forked copy of it (in a data loader's "
                "worker, say) counts for nobody: charge in the process that opened it."
            )
        if self._closed:
            raise LedgerError("this ledger is closed: open it again before the next release.")
        self.require_in_place()
        return self._lock

    def _unused(self) -> dict[str, int]:
        return {run: -block.left for run, block in self._blocks.items()}

    def _reserve(self, event: Event, run: str, limit: Limit | None) -> _Block:
        self._give_back(run)
        count = self._book.next_block(run, event)
        # A crash spends whole blocks, of this run and of others. They must not pass a budget either.
        while (
            count > 1
            and limit is not None
            and not limit.allows(self._book.entries_after(run, event, count, {}), self._book.plan)
        ):
            count //= 2
        if event not in self._book.ids:
            self._append_for(run, {"kind": "event", "id": len(self._book.ids), "event": event.to_dict()})
        self._append_for(run, {"kind": "reserve", "event": self._book.ids[event], "count": count})
        self._blocks[run] = _Block(event, count)
        return self._blocks[run]

    def _require_allowed(self, limit: Limit, event: Event, run: str) -> None:
        entries = self._book.entries_after(run, event, 1, self._unused())
        if not limit.allows(entries, self._book.plan):
            limit.refuse(entries)

    def _give_back(self, run: str) -> None:
        if run in self._blocks and self._blocks[run].left:
            self._settle(run)
        self._blocks.pop(run, None)

    def _settle(self, run: str) -> None:
        """State how much of the run's open reservation was used."""
        block = self._blocks.pop(run, None)  # first: if the line does not get written, the whole block counts
        if run in self._book.open:
            left = block.left if block else 0
            self._append_for(run, {"kind": "settle", "used": self._book.open[run] - left})

    def _append_for(self, run: str, record: Record) -> None:
        """A line about a run, which also says if one of its charges may not have been released."""
        if run != self._book.untagged:
            record["run"] = run
        if run in self._doubtful:
            record["exact"] = False
        self._append(record)
        self._doubtful.discard(run)

    @abstractmethod
    def _append(self, record: Record) -> None:
        """Make the record last, and only then put it in the book."""

    @abstractmethod
    def _release(self) -> None:
        """Let go of what the ledger is kept in."""
