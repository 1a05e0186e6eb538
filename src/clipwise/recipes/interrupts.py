"""Ctrl-C between steps: the run ends cleanly, and can be resumed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """Within this context the first Ctrl-C only sets `requested`. A second one raises KeyboardInterrupt.

    Args:
        notice: called at the first Ctrl-C.
    """

    def __init__(self, notice: Callable[[], None] = lambda: None) -> None:
        self.requested = False
        self._notice = notice
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # signals are handled there
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._notice()
