"""Inject one fault of each kind into a run. Each fault has its own process.

A function takes a plan and returns a run with the fault in place. It logs "fault" just before the fault.
"""

from __future__ import annotations

import errno
import io
import itertools
import linecache
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

import clipwise
from clipwise.errors import LedgerBusyError
from clipwise.ledger import crash_points, durable_files, ledger
from clipwise.noise import mechanism
from tests.faults.life import EXAMPLES, Run, make_visible, records
from tests.faults.plan import Plan
from tests.soundness.crash_child import Files, charge_late

_SOURCE = Path(clipwise.__file__).parent
_BOOKKEEPING = {
    str(_SOURCE / name)
    for name in (
        "engine/private.py",
        "engine/checkpoint.py",
        "ledger/budget.py",
        "ledger/durable_files.py",
        "ledger/file_format.py",
        "ledger/ledger.py",
        "ledger/multi_run.py",
        "noise/gaussian.py",
        "noise/mechanism.py",
        "sampling/loader.py",
    )
}


class At:
    """Acts when the run reaches a place, a point or a line of code, for the n-th time."""

    def __init__(self, plan: Plan, files: Files, act: Callable[[], None], lines: int) -> None:
        self._plan, self._act = plan, act
        self._visible = make_visible(files)
        self._hits: Counter[str] = Counter()
        self._lines = itertools.count(1)
        self._line = max(1, plan.turn * lines // 1000)
        crash_points.reached = self._reached
        if plan.at == "line":
            sys.settrace(self._entered)

    def _reached(self, point: str) -> None:
        self._visible(point)
        self._hits[point] += 1
        if point == self._plan.at and self._hits[point] == self._plan.turn:
            self._act()

    def _entered(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._traced if frame.f_code.co_filename in _BOOKKEEPING else None

    def _traced(self, frame: FrameType, event: str, argument: object) -> Any:
        if event != "line" or next(self._lines) < self._line:
            return self._traced
        # A signal cannot arrive between a lock and the block that it guards, or at its end; a tracer could.
        if not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            sys.settrace(None)
            frame.f_trace = None
            self._act()
        return self._traced


def count_lines(plan: Plan, files: Files) -> int:
    """Return the number of lines that a first process without a fault executes."""
    seen = 0

    def traced(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal seen
        seen += event == "line"
        return traced

    sys.settrace(lambda frame, *_: traced if frame.f_code.co_filename in _BOOKKEEPING else None)
    run = Run(plan, files)
    run.train_stubbornly(12)
    run.close()
    sys.settrace(None)
    return seen


def killed(plan: Plan, files: Files, lines: int) -> Run:
    """SIGKILL: memory is lost, written data stays."""

    def act() -> None:
        files.say("fault")
        os.kill(os.getpid(), signal.SIGKILL)

    At(plan, files, act, lines)
    run = Run(plan, files)
    if plan.planted == "late charge":
        charge_late(run.private)
    return run


def without_power(plan: Plan, files: Files, lines: int) -> Run:
    """SIGKILL, and unsynced data is lost except for a torn piece."""
    durable, honest = {}, os.fsync

    def sync(handle: int) -> None:
        honest(handle)
        if plan.planted != "no fsync" or not durable:
            durable[os.fstat(handle).st_ino] = os.fstat(handle).st_size

    def act() -> None:
        files.say("fault")
        at = files.ledger.stat()
        kept = durable.get(at.st_ino, 0)
        os.truncate(files.ledger, kept + int((at.st_size - kept) * plan.share))
        os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = sync  # type: ignore[assignment]
    At(plan, files, act, lines)
    return Run(plan, files)


def interrupted(plan: Plan, files: Files, lines: int) -> Run:
    """Ctrl-C. The user inspects the run and starts the loop again."""

    def act() -> None:
        files.say("fault")
        raise KeyboardInterrupt

    run = Run(plan, files)
    At(plan, files, act, lines)
    return run


def without_space(plan: Plan, files: Files, lines: int) -> Run:
    """The disk is full: a write fails after a part of its data, or a sync fails."""
    if plan.at == "limit":
        return _on_a_small_disk(plan, files)

    def act() -> None:
        files.say("fault")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = Run(plan, files)
    At(plan, files, act, lines)
    return run


def _on_a_small_disk(plan: Plan, files: Files) -> Run:
    """The disk fills up while a line of the ledger is written."""
    crash_points.reached = make_visible(files)

    class Small(io.FileIO):
        free = 1200 + int(100 * plan.turn * plan.share)  # header, description and the first events take about 1,200

        def write(self, data: Any) -> int:
            if len(data) <= self.free:
                Small.free -= len(data)
                return super().write(data)
            files.say("fault")
            if self.free:
                rest, Small.free = self.free, 0
                return super().write(data[:rest])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    durable_files.FileIO = Small  # type: ignore[misc]
    return Run(plan, files)


def read_only(plan: Plan, files: Files, lines: int) -> Run:
    """The ledger's file system becomes read-only: when it is opened, or in the middle of a run."""
    crash_points.reached = make_visible(files)

    class ReadOnly(io.FileIO):
        writes = itertools.count(1)

        def __init__(self, *arguments: Any) -> None:
            if plan.at == "open":
                files.say("fault")
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            super().__init__(*arguments)

        def write(self, data: Any) -> int:
            if next(self.writes) == 2 + plan.turn:  # after the header and the line about the run
                files.say("fault")
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return super().write(data)

    honest, durable_files.FileIO = durable_files.FileIO, ReadOnly  # type: ignore[misc]
    try:
        return Run(plan, files)
    except clipwise.LedgerError as error:
        files.say(f"caught {type(error).__name__}")
        durable_files.FileIO = honest  # type: ignore[misc]
        return Run(plan, files)  # the disk is mounted again


def with_a_second_writer(plan: Plan, files: Files, lines: int) -> Run:
    """Another process opens the same ledger, and a forked copy of the run tries to charge."""
    run = Run(plan, files)

    def act() -> None:
        files.say("fault")
        try:
            ledger.FileLedger(files.ledger, join=True)
            files.say("error: a second writer was let in")
        except LedgerBusyError:
            pass
        copy = os.fork()
        if copy == 0:
            try:
                run.private._context.ledger.charge(run.private._context.event)
                files.say("error: a forked copy could charge")
            except clipwise.LedgerError:
                pass
            os._exit(0)
        os.waitpid(copy, 0)

    At(plan, files, act, lines)
    return run


def with_a_mad_clock(plan: Plan, files: Files, lines: int) -> Run:
    """From some step on the clock returns another century."""
    jumps = itertools.cycle([0.0, 4e9, -1e9, 1e18])

    def act() -> None:
        files.say("fault")
        for name in ("time", "monotonic", "perf_counter"):
            setattr(time, name, lambda: next(jumps))
        for name in ("time_ns", "monotonic_ns", "perf_counter_ns"):
            setattr(time, name, lambda: int(next(jumps)))

    run = Run(plan, files)
    At(plan, files, act, lines)
    return run


def on_records_that_are_not_finite(plan: Plan, files: Files, lines: int) -> Run:
    """Some records, or all of them, are NaN, infinite, or so large that squares overflow."""
    value = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "huge": 1e38}[plan.at]
    dataset = records()
    dataset.tensors[0][: plan.turn * EXAMPLES // 12] = value
    crash_points.reached = make_visible(files)
    files.say("fault")
    return Run(plan, files, dataset=dataset)


def out_of_memory(plan: Plan, files: Files, lines: int) -> Run:
    """There is no memory for more than two examples at once, or for the noise of one step."""
    run = Run(plan, files)
    crash_points.reached = make_visible(files)
    is_armed = True

    def fail() -> None:
        nonlocal is_armed
        is_armed = plan.is_compiled and plan.at != "noise"  # the shortage lasts if the run can handle it
        files.say("fault")
        raise torch.OutOfMemoryError("out of memory (a fault of the test)")

    if plan.at == "noise":
        honest = mechanism.add_gaussian
        turns = itertools.count(1)

        def add_gaussian(*arguments: Any, **options: Any) -> None:
            if next(turns) == plan.turn and is_armed:
                fail()
            honest(*arguments, **options)

        mechanism.add_gaussian = add_gaussian
        return run
    if plan.at == "forward":
        forward = run.model.forward

        def checked(x: Tensor) -> Tensor:
            if is_armed and len(x) > 2:
                fail()
            return forward(x)

        run.model.forward = checked  # type: ignore[method-assign]
        return run
    clipper: Any = run.private._context.clipper
    clip = clipper.clipped_sum

    def clipped_sum(losses: Tensor, *arguments: Any) -> Any:
        if is_armed and len(losses) > 2:
            fail()
        return clip(losses, *arguments)

    clipper.clipped_sum = clipped_sum
    return run


def with_a_worker_that_dies(plan: Plan, files: Files, lines: int) -> Run:
    """The process that fetches records is killed, once."""

    class Deadly(Dataset[Any]):
        inner, fetched = records(), itertools.count(1)

        def __len__(self) -> int:
            return EXAMPLES

        def __getitem__(self, index: int) -> Any:
            if get_worker_info() and next(self.fetched) == plan.turn and "fault" not in files.said():
                files.say("fault")
                os.kill(os.getpid(), signal.SIGKILL)
            return self.inner[index]

    crash_points.reached = make_visible(files)
    return Run(plan, files, dataset=Deadly())


INJECT: dict[str, Callable[[Plan, Files, int], Run]] = {
    "kill": killed,
    "power cut": without_power,
    "ctrl-c": interrupted,
    "full disk": without_space,
    "read-only ledger": read_only,
    "two writers": with_a_second_writer,
    "clock jump": with_a_mad_clock,
    "not finite": on_records_that_are_not_finite,
    "out of memory": out_of_memory,
    "worker crash": with_a_worker_that_dies,
}
