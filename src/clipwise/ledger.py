"""What has been released. A crash can make the ledger say too much, never too little.

A release is charged *before* any noised value becomes visible. So that a step need not wait for the
disk, one line reserves a block of releases, which is then used up without touching the file. A clean end
settles: it states how much of the last block was used. After any other end the whole block is spent.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TypeAlias, TypeVar

from clipwise import faults
from clipwise.book import Book, Record, encode, header_line, replay, require_same_run
from clipwise.errors import ConfigurationError, LedgerBusyError, LedgerError
from clipwise.files import sync_folder
from clipwise.privacy import Entry, Event

JSON: TypeAlias = "Mapping[str, JSON] | Sequence[JSON] | str | int | float | bool | None"
SomeLedger = TypeVar("SomeLedger", bound="Ledger")

# An fsync takes 0.1 ms on the disks tried, and seldom over 1 ms. Shared by 64 steps that is less than 20
# microseconds a step: 2% of a step of 1 ms. Blocks are 1, 2, 4, ... up to this, so n releases in a row
# have reserved fewer than 2n and fewer than n + 64. The size follows the count alone: were it chosen by
# how long steps take, the file would hold something that depends on the batches drawn.
LARGEST_BLOCK = 64


class Ledger(ABC):
    """What has been released, in order. For one process, whose threads may share it."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._event: Event | None = None  # what the reservation in use is for,
        self._size = 0  # its size,
        self._left = 0  # and how much of it is not used: it is in the book, but not yet charged
        self._closed = False
        self._process = os.getpid()
        self._lock = threading.Lock()

    @property
    def run(self) -> str:
        """The id of the run, random hex."""
        return self._book.run

    @property
    def position(self) -> int:
        """How many releases have been charged, those found when the ledger was opened included."""
        with self._lock:
            return self._book.total - self._left

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

    def history(self) -> list[Entry]:
        """The releases charged so far, run-length coded, never merged across a restart."""
        with self._lock:
            return self._book.entries_without(self._left)

    def charge(self, event: Event) -> None:
        """Count one release of `event`: when this returns, no crash can undo it.

        Call it before any noised value becomes visible. If it raises, release nothing.
        """
        with self._usable():
            same = event is self._event or event == self._event
            if not (same and self._left):
                self._reserve(event, min(2 * self._size, self._book.block) if same else 1)
            self._left -= 1

    def describe(self, about: Mapping[str, JSON]) -> None:
        """Keep what a run says about itself: `about` is public, compared with nothing, and charges nothing."""
        with self._usable():
            told = json.loads(encode(about))
            if self._book.about[-1:] != [told]:
                self._append({"kind": "about", "about": told})

    def declare(self, kind: str, reason: str) -> None:
        """Keep that the user declared a change of the weights which no release made. It is public."""
        with self._usable():
            self._append({"kind": "declared", "update": kind, "reason": reason})

    def restart(self) -> None:
        """A new noise key begins: what follows is not merged with what came before."""
        with self._usable():
            if not self._book.parted:
                self._give_back()
                self._append({"kind": "restart"})

    def import_history(self, entries: Sequence[Entry]) -> None:
        """Charge, all or nothing, what a run released before it goes on in this empty ledger.

        The entries stay as they are, and nothing that follows is merged with them: this ledger was not
        there, so it cannot know whether the same noise key goes on.
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
                self._append({"kind": "import", "entries": [[e.event.to_dict(), e.count] for e in entries]})

    def close(self, verified: bool | None = None) -> None:
        """End cleanly: what was reserved and not used is given back. Later charges are refused.

        Args:
            verified: whether a run that ends found the model's weights to be what its releases left.
        """
        with self._lock:
            if not self._closed and os.getpid() == self._process:
                if self._book.reserved:
                    self._settle()
                if verified is not None:
                    self._append({"kind": "closed", "verified": verified})
                self._release()
            self._closed = True

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
        return self._lock

    def _reserve(self, event: Event, count: int) -> None:
        self._give_back()
        if event not in self._book.ids:
            self._append({"kind": "event", "id": len(self._book.ids), "event": event.to_dict()})
        self._append({"kind": "reserve", "event": self._book.ids[event], "count": count})
        self._event, self._size, self._left = event, count, count

    def _give_back(self) -> None:
        self._event = None
        if self._left:
            self._settle()

    def _settle(self) -> None:
        left, self._left = self._left, 0  # first: if the line does not get written, the whole block counts
        self._append({"kind": "settle", "used": self._book.reserved - left})

    @abstractmethod
    def _append(self, record: Record) -> None:
        """Make the record last, and only then put it in the book."""

    @abstractmethod
    def _release(self) -> None:
        """Let go of what the ledger is kept in."""


class MemoryLedger(Ledger):
    """A ledger that ends with its process: for tests, and where nobody relies on the count later."""

    def __init__(self, run: str | None = None) -> None:
        super().__init__(Book())
        self._append(header_line(run, LARGEST_BLOCK, {}))

    def _append(self, record: Record) -> None:
        self._book.apply(record)

    def _release(self) -> None:
        pass


class FileLedger(Ledger):
    """A ledger in a file, which is held against other writers from opening to `close()`.

    Args:
        path: the file. A missing or empty one is begun; else the run in it goes on, and if that did not
            end cleanly, all that it may have released is counted.
        header: public configuration to keep in the file; must equal that of a run found there.
        join: begin a new run in the file of another: its releases compose with those there.
        block: for a file that is begun, the most releases to reserve at once, and so the most that a
            crash overstates by.
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
        self._file = _open_locked(self.path)
        try:
            data = self._file.readall()
            self.existing = bool(data) and not join  # a run was found, and is the one to go on with
            book, recovery, _ = replay(data, self.path) if data else (Book(), None, False)
            super().__init__(book)
            if not data:
                self._append(header_line(None, block or LARGEST_BLOCK, given or {}))
                sync_folder(self.path.absolute().parent)
            elif not join:
                require_same_run(book.header, given, self.path)
            if recovery is not None:
                self._append(recovery, after=b"" if data.endswith(b"\n") else b"\n")
            if data and join:
                self._append({"kind": "join", "header": book.header if given is None else given})
        except BaseException:
            self._file.close()
            raise

    @property
    def header(self) -> Mapping[str, JSON]:
        """The public configuration in the file; the latest, if runs have joined."""
        return self._book.header

    def _append(self, record: Record, after: bytes = b"") -> None:
        line = self._book.seal(record)
        data = after + line + b"\n"
        try:
            if self._file.write(data) != len(data):
                raise OSError("the disk is full")
            if record["kind"] == "reserve":
                faults.reached("ledger.before-fsync")
            os.fsync(self._file.fileno())
            if record["kind"] == "reserve":
                faults.reached("ledger.after-fsync")
            self._book.take(line)
        except BaseException as error:
            # How much of the line is on disk is not known. Write no more: the next opening recovers.
            self._closed = True
            self._release()
            if isinstance(error, OSError):
                raise LedgerError(
                    f"{self.path} cannot be written ({error.strerror or error}): nothing may be released. "
                    "Open the ledger again when the disk can be written."
                ) from error
            raise

    def _release(self) -> None:
        # Closing alone would leave the lock to the copies that forked workers hold.
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()


@dataclass(frozen=True)
class Snapshot:
    """What a ledger file says; whatever may have been released is counted.

    Attributes:
        run: the id of the run.
        header: the public configuration; the latest, if runs have joined.
        history: the releases, run-length coded, with reservations in full until they are settled.
        position: their number.
        clean: whether the last writer has ended cleanly.
        torn: whether the last line is torn; if so, the largest block is counted for it.
        about: what the run said about itself each time it began or went on; empty in older files.
        declared: kind and reason of changes of the weights that a user declared.
        verified: whether the weights were what the releases left when the last run was closed; None if it was not.
    """

    run: str
    header: Mapping[str, JSON]
    history: list[Entry]
    position: int
    clean: bool
    torn: bool
    about: tuple[Mapping[str, JSON], ...] = ()
    declared: tuple[tuple[str, str], ...] = ()
    verified: bool | None = None


def read(path: str | os.PathLike[str]) -> Snapshot:
    """What the ledger at `path` says. Neither changes nor locks the file, which may be in use."""
    path = Path(path)
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would be waited for, for ever
            raise LedgerError(f"{path} cannot be read as a ledger: it is not a regular file.")
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise LedgerError(f"{path} cannot be read as a ledger: {reason}.") from error
    if not data:
        raise LedgerError(f"{path} is empty: no run has begun in it.")
    book, recovery, torn = replay(data, path)
    if recovery is not None:
        book.apply(recovery)
    return Snapshot(
        book.run,
        book.header,
        book.entries,
        book.total,
        recovery is None,
        torn,
        tuple(book.about),
        tuple(book.declared),
        book.verified,
    )


def _open_locked(path: Path) -> FileIO:
    """The file, unbuffered, to read from its beginning and to append to, held against other writers."""
    file = None
    try:
        file = FileIO(path, "a+")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.seek(0)
        return file
    except OSError as error:
        if file is not None:
            file.close()
        if isinstance(error, BlockingIOError):
            raise LedgerBusyError(
                f"{path} is in use: another process, or another ledger object in this one, writes to it. "
                "Close that one first, or give this run a file of its own."
            ) from error
        raise LedgerError(f"{path} cannot be opened as a ledger: {error.strerror}.") from error
