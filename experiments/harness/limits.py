"""Time limits of runs and measurements, and reasons why one has no result."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from clipwise.errors import ClipwiseError, ConfigurationError


class TooSlow(Exception):  # noqa: N818 (a limit, not an error)
    """The limit on the time of a measurement has passed."""


class OutOfTimeError(Exception):
    """The time is up in the middle of a run.

    Attributes:
        progress: the values that the run reports so far.
    """

    def __init__(self, progress: dict[str, Any] | None = None) -> None:
        super().__init__("out of time")
        self.progress: dict[str, Any] = progress or {}


class MissingDataError(Exception):
    """A data set is missing. This ends the command; it is not the result of a run."""

    def __init__(self, reason: ConfigurationError) -> None:
        super().__init__(str(reason))
        self.reason = reason


@contextmanager
def reading_data() -> Iterator[None]:
    """Raise configuration errors inside the block as `MissingDataError`."""
    try:
        yield
    except ConfigurationError as error:
        raise MissingDataError(error) from error


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TooSlow` inside the block when the time is up, between two operations.

    Signals reach only the main thread: other threads have no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise TooSlow(f"took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the machine had no memory left."""
    no_more = "can't allocate memory" in str(error)  # torch's CPU allocator has no error type of its own
    return isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) or no_more


def reason_of(error: BaseException) -> str:
    """The reason of a failure in one line."""
    if is_out_of_memory(error):
        return "out of memory"
    if isinstance(error, TooSlow):
        return str(error)
    first = (str(error).strip().splitlines() or [""])[0]
    return f"refused: {first}" if isinstance(error, ClipwiseError) else f"{type(error).__name__}: {first}"


class Deadline:
    """The end of the time for the whole command; None for no limit."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that are left."""
        return float("inf") if self._end is None else self._end - time.monotonic()

    def require(self) -> None:
        """Raise `OutOfTimeError` if nothing is left."""
        if self.left() <= 0:
            raise OutOfTimeError
