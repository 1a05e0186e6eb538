"""Where a ledger is kept: in memory, or in a file. What is charged and how is in ledger_base.py."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from clipwise.errors import ConfigurationError, LedgerBusyError, LedgerError
from clipwise.ledger import crash_points
from clipwise.ledger.base import JSON, Ledger
from clipwise.ledger.durable_files import sync_folder
from clipwise.ledger.file_format import FORMAT, Book, Record, encode, header_line, replay, require_same_run
from clipwise.privacy import Entry

__all__ = ["JSON", "LARGEST_BLOCK", "FileLedger", "Ledger", "MemoryLedger", "Snapshot", "read"]

# The most releases to reserve at once. Until then a reservation is at most 4 releases, or 2% of what its run has
# made (`Book.next_block`), so a crash after n releases overstates by at most max(4, n / 50). One step in 4 waits for
# an fsync at first, one in 64 from 3,200 steps on.
LARGEST_BLOCK = 64


class MemoryLedger(Ledger):
    """A ledger that ends with its process: for tests, and where nobody relies on the count later."""

    def __init__(self, run: str | None = None) -> None:
        super().__init__(Book())
        self._append(header_line(run, LARGEST_BLOCK, {}))

    def require_in_place(self) -> None:
        """A ledger in memory is always in place."""

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
        block: for a file that is begun, the most releases that a run reserves at once, and so the most that a
            crash overstates it by. It is at most 4 or 2% of what the run has made in any case.
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
        self._where = os.path.abspath(path)  # also after a change of the working folder
        self._identity = os.fstat(self._file.fileno())
        self._length = 0
        try:
            data = self._file.readall()
            self._length = len(data)
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
            if book.format < FORMAT:
                self._append({"kind": "format", "format": FORMAT})
            if data and join:
                self._append({"kind": "join", "header": book.header if given is None else given})
        except BaseException:
            self._file.close()
            raise

    @property
    def header(self) -> Mapping[str, JSON]:
        """The public configuration in the file; the latest, if runs have joined."""
        return self._book.header

    def require_in_place(self) -> None:
        """Raise LedgerError if the path no longer names the file that is written to, or that has become shorter."""
        length, there = self._length, None  # first the length: another thread may be writing
        with contextlib.suppress(OSError):
            there = os.stat(self._where)
        if self._closed:
            return
        if there is None or not os.path.samestat(there, self._identity) or there.st_size < length:
            raise LedgerError(
                f"{self.path} was removed, replaced or shortened while a run writes to it, so what is released would "
                "be on no file: nothing may be released. Put the file back, and go on. If it is lost, save "
                "private.state_dict() and load it into a run with a new ledger, which takes over all that was counted."
            )

    def _append(self, record: Record, after: bytes = b"") -> None:
        line = self._book.seal(record)
        data = after + line + b"\n"
        try:
            if self._file.write(data) != len(data):
                raise OSError("the disk is full")
            self._length += len(data)
            if record["kind"] == "reserve":
                crash_points.reached("ledger.before-fsync")
            os.fsync(self._file.fileno())
            if record["kind"] == "reserve":
                crash_points.reached("ledger.after-fsync")
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
        torn: whether the last line is torn; if so, the most that it may stand for is counted.
        about: what the run said about itself each time it began or went on; empty in older files.
        exact: whether everything that is counted was released.
        plan: the first plan that a run has described; None in older files.
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
    exact: bool = True
    plan: Mapping[str, JSON] | None = None
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
    clean, about = recovery is None, tuple(book.about)
    return Snapshot(
        book.run,
        book.header,
        book.entries,
        book.total,
        clean,
        torn,
        about,
        book.exact and clean,
        book.plan,
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
