"""Files that a crash leaves complete, and files with a single writer."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import IO, Any

from clipwise.errors import ConfigurationError, LedgerBusyError, LedgerError
from clipwise.ledger import crash_points


def replace_file(path: Path, write: Callable[[IO[bytes]], Any], mode: int) -> None:
    """Write a file so that a crash leaves the old one or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, mode)
            write(file)
            file.flush()
            crash_points.reached("checkpoint.during-write")
            os.fsync(handle)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def require_writable(argument: str, path: Path) -> None:
    """Raise early for a path where no file can be written. Makes its folder."""
    require_folder(path.parent, argument)
    if path.is_dir():
        raise ConfigurationError(f"{argument}: {path} cannot be written (it is a folder): give another path.")


def require_folder(folder: Path, argument: str = "--out") -> None:
    """Make a folder. Raise early if that is not possible, or if no file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # a test of the permission is not enough
            pass
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(f"{argument}: {folder} cannot be written ({reason}): give another path.") from error


def sync_folder(folder: Path) -> None:
    """Make the names in a folder as durable as the files."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_locked(path: Path) -> FileIO:
    """Open a ledger file for reading and appending, unbuffered and locked against other writers."""
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
                "Close that one first (private.close()), or give this run its own file."
            ) from error
        raise LedgerError(f"{path} cannot be opened as a ledger: {error.strerror}.") from error
