"""Ledgers of releases. A crash can make a ledger count too many releases, never too few.

A release is charged *before* any noised value becomes visible. One line reserves a block of releases, so that most
steps need not wait for the disk. A clean end settles the last block: it records how many of its releases were used.
After any other end the whole block counts.

Several runs may charge one ledger, also at the same time. Each has its own tag, block and growing entry.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol
from weakref import WeakValueDictionary

from clipwise.errors import ConfigurationError, LedgerError
from clipwise.ledger import crash_points, file_format
from clipwise.ledger.durable_files import open_locked, sync_folder
from clipwise.ledger.file_format import JSON, LedgerState, Record, Snapshot, encode, header_line, read
from clipwise.privacy import Entry, Event

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["JSON", "FileLedger", "Ledger", "Limit", "MemoryLedger", "Snapshot", "read"]


class Limit(Protocol):
    """Decides whether a release may be charged. It is called while the ledger is locked."""

    def allows(self, history: Sequence[Entry], plan: Mapping[str, JSON] | None) -> bool: ...
    def refuse(self, history: Sequence[Entry]) -> NoReturn: ...


@dataclass
class _Block:
    event: Event
    left: int  # unused releases: counted in the state, but not yet charged


class Ledger(ABC):
    """All releases, in order. A ledger belongs to one process; its threads may share it."""

    existing: bool = False  # whether a run was found in it and is to be continued

    def __init__(self, state: LedgerState) -> None:
        self._state = state
        self._blocks: dict[str, _Block] = {}  # by run
        self._users: WeakValueDictionary[str, object] = WeakValueDictionary()  # the object that charges under each tag
        # Runs with a charge that may not have been released, which is not yet written.
        self._doubtful: set[str] = set()
        self._closed, self._process = False, os.getpid()
        self._lock = threading.Lock()

    @property
    def run(self) -> str:
        """The id of the ledger, random hex."""
        return self._state.run

    @property
    def untagged(self) -> str:
        """The tag of releases that were charged without one: the run that began or joined last."""
        return self._state.untagged

    @property
    def position(self) -> int:
        """The number of releases charged, including those found when the ledger was opened."""
        with self._lock:
            return self._state.total - sum(block.left for block in self._blocks.values())

    @property
    def about(self) -> tuple[Mapping[str, JSON], ...]:
        """The descriptions from `describe`, in order."""
        with self._lock:
            return tuple(self._state.about)

    @property
    def declared(self) -> tuple[tuple[str, str], ...]:
        """Kind and reason of every update from `declare`, in order."""
        with self._lock:
            return tuple(self._state.declared)

    @property
    def plan(self) -> Mapping[str, JSON] | None:
        """The first plan that a run described, if any: `budget`, `delta`, `planned` steps, and whether it is `late`."""
        return self._state.plan

    @property
    def is_closed(self) -> bool:
        """Whether nothing more can be charged."""
        return self._closed

    @property
    def exact(self) -> bool:
        """Whether every charged release was made."""
        return self._state.exact and not self._doubtful

    def made(self, run: str) -> int:
        """The number of releases charged by this run."""
        with self._lock:
            block = self._blocks.get(run)
            return self._state.counts.get(run, 0) - (block.left if block else 0)

    def history(self) -> list[Entry]:
        """The releases charged so far, run-length coded, never merged across runs or a restart."""
        with self._lock:
            return self._state.entries_with(self._unused())

    def require_allowed(self, limit: Limit, event: Event, run: str) -> None:
        """Raise if `charge` would exceed the limit. Charges nothing."""
        with self._lock:
            self._require_allowed(limit, event, run)

    def charge(self, event: Event, run: str | None = None, limit: Limit | None = None) -> None:
        """Count one release, before any noised value becomes visible. If it raises, release nothing.

        Args:
            event: what is released.
            run: the tag of the run that releases it; by default `untagged`.
            limit: must allow the whole ledger, with this release and those of other runs.
        """
        with self._usable():
            run = self._state.untagged if run is None else run
            if limit is not None:
                self._require_allowed(limit, event, run)
            block = self._blocks.get(run)
            if block is None or not block.left or not (event is block.event or event == block.event):
                block = self._reserve(event, run, limit)
            block.left -= 1

    def doubt(self, run: str) -> None:
        """Record that the last charge of the run may not have been released: the count is no longer exact."""
        self._doubtful.add(run)

    def describe(self, about: Mapping[str, JSON]) -> None:
        """Record the public description of a run. Charges nothing."""
        with self._usable():
            if self._state.about[-1:] != [description := json.loads(encode(about))]:
                self._append({"kind": "about", "about": description})

    def declare(self, run: str, kind: str, reason: str) -> None:
        """Record a change of the weights that the user declared and no release made. It is public."""
        with self._usable():
            self._append_for(run, {"kind": "declared", "update": kind, "reason": reason})

    def restart(self, run: str | None = None) -> None:
        """Record that the run takes a new noise key: later releases are not merged with earlier ones."""
        with self._usable():
            run = self._state.untagged if run is None else run
            if self._state.is_growing(run):
                self._give_back(run)
                self._append_for(run, {"kind": "restart"})

    def import_history(
        self, entries: Sequence[Entry], *, exact: bool = True, plan: Mapping[str, JSON] | None = None
    ) -> None:
        """Charge, all or nothing, the earlier releases of a run that continues in this empty ledger.

        Later releases are not merged with them: they may use another noise key. `exact` is whether all were released,
        `plan` the plan of the ledger that they come from.
        """
        with self._usable():
            if self._state.total:
                raise LedgerError(
                    "import_history: this ledger already holds releases. Continue the checkpoint with a "
                    "new ledger, or with the one that it was made with."
                )
            if any(entry.count < 1 for entry in entries):
                raise LedgerError("import_history: every entry must count at least one release.")
            if entries:
                listed = [[e.event.to_dict(), e.count, e.run or self._state.untagged] for e in entries]
                copied = None if plan is None else json.loads(encode(plan))
                self._append({"kind": "import", "entries": listed, "exact": bool(exact), "plan": copied})

    def enter(self, run: str, user: object) -> bool:
        """Let `user` charge under the tag `run`; False if the tag is in use."""
        with self._usable():
            return self._users.setdefault(run, user) is user

    def leave(self, run: str, user: object, verified: bool | None = None) -> None:
        """End the use of a tag and give back its unused reservation. Closes the ledger after the last user.

        `verified` is whether the model's weights were verified at the end of the run.
        """
        try:
            with self._lock:
                if self._users.get(run) is user:
                    del self._users[run]
                if self._is_writable():
                    self.require_in_place()
                    self._settle(run)
                    if verified is not None:
                        self._append_for(run, {"kind": "closed", "verified": verified})
        finally:
            if not self._users:
                self.close()

    def close(self) -> None:
        """End cleanly: give back unused reservations. Later charges raise."""
        with self._lock:
            try:
                if self._is_writable():
                    self.require_in_place()
                    for run in list(self._state.open):
                        self._settle(run)
            finally:
                if self._is_writable():
                    self._release()
                self._closed = True

    @abstractmethod
    def require_in_place(self) -> None:
        """Raise LedgerError if the ledger is no longer where it was written."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _is_writable(self) -> bool:
        return not self._closed and os.getpid() == self._process

    def _usable(self) -> threading.Lock:
        """The lock to hold while writing. Raises if the ledger cannot be written."""
        if os.getpid() != self._process:
            raise LedgerError(
                "this ledger was opened by another process, and a forked copy of it (for instance in a data loader's "
                "worker) cannot be charged: charge in the process that opened it."
            )
        if self._closed:
            raise LedgerError("this ledger is closed: open it again before the next release.")
        self.require_in_place()
        return self._lock

    def _unused(self) -> dict[str, int]:
        return {run: -block.left for run, block in self._blocks.items()}

    def _reserve(self, event: Event, run: str, limit: Limit | None) -> _Block:
        self._give_back(run)
        state, count = self._state, self._state.next_block(run, event)
        if limit is not None:
            # A crash spends the whole blocks of all runs. They must be within the budget, too.
            while count > 1 and not limit.allows(state.entries_after(run, event, count, {}), state.plan):
                count //= 2
        if event not in state.ids:
            self._append_for(run, {"kind": "event", "id": len(state.ids), "event": event.to_dict()})
        self._append_for(run, {"kind": "reserve", "event": state.ids[event], "count": count})
        self._blocks[run] = block = _Block(event, count)
        return block

    def _require_allowed(self, limit: Limit, event: Event, run: str) -> None:
        entries = self._state.entries_after(run, event, 1, self._unused())
        if not limit.allows(entries, self._state.plan):
            limit.refuse(entries)

    def _give_back(self, run: str) -> None:
        if run in self._blocks and self._blocks[run].left:
            self._settle(run)
        self._blocks.pop(run, None)

    def _settle(self, run: str) -> None:
        """Record how much of the run's open reservation was used."""
        block = self._blocks.pop(run, None)  # first: if writing the line fails, the whole block counts
        if run in self._state.open:
            left = block.left if block else 0
            self._append_for(run, {"kind": "settle", "used": self._state.open[run] - left})

    def _append_for(self, run: str, record: Record) -> None:
        """Append a line about a run. It also records if one of its charges may not have been released."""
        if run != self._state.untagged:
            record["run"] = run
        if run in self._doubtful:
            record["exact"] = False
        self._append(record)
        self._doubtful.discard(run)

    @abstractmethod
    def _append(self, record: Record) -> None:
        """Make the record durable, and only then apply it to the state."""

    @abstractmethod
    def _release(self) -> None:
        """Close the ledger's storage."""


class MemoryLedger(Ledger):
    """A ledger in memory, lost when its process ends: for tests, or if no later record is needed."""

    def __init__(self, run: str | None = None) -> None:
        super().__init__(LedgerState())
        self._append(header_line(run))

    def require_in_place(self) -> None:
        """A ledger in memory is always in place."""

    def _append(self, record: Record) -> None:
        self._state.apply(record)

    def _release(self) -> None:
        pass


class FileLedger(Ledger):
    """A ledger in a file, which is locked against other writers until `close()`.

    Args:
        path: the file. A missing or empty file starts a new ledger. Otherwise the run in the file continues; if it did
            not end cleanly, everything that it may have released is counted.
        header: public configuration to keep in the file; must equal that of a run found there.
        join: begin a new run in an existing file. Its releases compose with those in the file.
        block: for a new file, the most releases that a run reserves at once.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        header: Mapping[str, JSON] | None = None,
        join: bool = False,
        block: int | None = None,
    ) -> None:
        if block is not None and block < 1:
            raise ConfigurationError("block must be at least 1: the most releases to reserve at once.")
        given: Record | None = None if header is None else json.loads(encode(header))
        self.path = Path(path)
        self._file = open_locked(self.path)
        self._where = os.path.abspath(path)  # also after a change of the working folder
        self._identity = os.fstat(self._file.fileno())
        self._length = 0
        try:
            data = self._file.readall()
            self._length = len(data)
            self.existing = bool(data) and not join  # a run was found and is to be continued
            state, recovery, _ = file_format.replay(data, self.path) if data else (LedgerState(), None, False)
            super().__init__(state)
            if not data:
                self._append(header_line(None, block, given))
                sync_folder(self.path.absolute().parent)
            elif not join:
                file_format.require_same_run(state.header, given, self.path)
            if recovery is not None:
                self._append(recovery, after=b"" if data.endswith(b"\n") else b"\n")
            if data and join:
                self._append({"kind": "join", "header": state.header if given is None else given})
        except BaseException:
            self._file.close()
            raise

    def require_in_place(self) -> None:
        """Raise LedgerError if the path no longer names the open file, or if the file has become shorter."""
        length, there = self._length, None  # the length first: another thread may be writing
        with contextlib.suppress(OSError):
            there = os.stat(self._where)
        if self._closed:
            return
        if there is None or not os.path.samestat(there, self._identity) or there.st_size < length:
            raise LedgerError(
                f"{self.path} was removed, replaced or shortened while a run writes to it, so releases would not be "
                "recorded: nothing may be released. Put the file back and continue. If it is lost, save "
                "private.state_dict() and load it into a run with a new ledger, which takes over all counted releases."
            )

    def _append(self, record: Record, after: bytes = b"") -> None:
        data = after + (line := self._state.seal(record)) + b"\n"
        try:
            if self._file.write(data) != len(data):
                raise OSError("the disk is full")
            self._length += len(data)
            if record["kind"] == "reserve":
                crash_points.reached("ledger.before-fsync")
            os.fsync(self._file.fileno())
            if record["kind"] == "reserve":
                crash_points.reached("ledger.after-fsync")
            self._state.take(line)
        except BaseException as error:
            # It is unknown how much of the line is on disk. Write no more: the next opening recovers.
            self._closed = True
            self._release()
            if isinstance(error, OSError):
                raise LedgerError(
                    f"{self.path} cannot be written ({error.strerror or error}): nothing may be released. "
                    "Open the ledger again when the disk can be written."
                ) from error
            raise

    def _release(self) -> None:
        # Forked workers hold copies of the file, and closing alone would leave the lock with them.
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()
