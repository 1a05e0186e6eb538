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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        reason = "it is a folder" if path.is_dir() else None
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        reason = str(error.strerror if isinstance(error, OSError) else error)
    if reason is not None:
        raise ConfigurationError(f"{argument}: {path} cannot be written ({reason}): give another path.")


def require_folder(folder: Path) -> None:
    """Refuse an --out that is not a folder, or that cannot be created or written."""
    whole = Path(os.path.abspath(folder))
    place = next(p for p in (whole, *whole.parents) if os.path.lexists(p))
    if not os.path.isdir(place):
        raise ConfigurationError(f"--out {folder} cannot be a folder: {place.name} is a file. Give another name.")
    try:
        # Testing the permission is not enough: /proc grants it and still refuses to write.
        with tempfile.TemporaryDirectory(dir=place) as trial:
            (Path(trial) / whole.relative_to(place)).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"--out {folder} cannot be written: {place} does not allow it ({error.strerror}). Give another folder."
        ) from error


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
                "Close that one first, or give this run its own file."
            ) from error
        raise LedgerError(f"{path} cannot be opened as a ledger: {error.strerror}.") from error
