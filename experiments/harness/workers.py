"""Runs in this process, or several at a time in separate processes that share a device."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import warnings
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType

import torch

from clipwise.engine.compiled import CaptureWarning
from clipwise.errors import ConfigurationError
from experiments.harness.environment import at_its_best, device_of
from experiments.harness.limits import Deadline, MissingDataError, OutOfTimeError, reason_of
from experiments.harness.paper import Options, Task
from experiments.harness.store import Cell
from experiments.index import paper_of

UNFINISHED = "unfinished"  # the folder of runs that continue later


class WorkersLostError(Exception):
    """A worker process was killed, for example for lack of memory."""


class Workers:
    """Starts runs. With one worker a run has finished when `begin` returns.

    Processes are spawned once, each with one thread, and read each data set once. They write only checkpoints of
    unfinished runs; the main process writes results.
    """

    def __init__(self, options: Options, deadline: Deadline) -> None:
        if isinstance(options.workers, bool) or options.workers < 1:
            raise ConfigurationError(f"workers={options.workers} is not possible: give 1 or more.")
        self._options, self._deadline = options, deadline
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        if self._options.workers > 1:
            spawn = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
            self._pool = ProcessPoolExecutor(self._options.workers, mp_context=spawn, initializer=_prepare)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def begin(self, task: Task) -> Future[Cell]:
        """Start a run."""
        left = self._deadline.left()
        end = None if left == float("inf") else time.time() + left
        given: Future[Cell] = Future()
        if self._pool is None:
            given.set_result(run(task, self._options, end))
            return given
        try:
            inner = self._pool.submit(run, task, self._options, end)
        except BrokenProcessPool as error:
            given.set_exception(_lost(error))
            return given
        inner.add_done_callback(lambda done: _pass_on(done, given))
        return given


def run(task: Task, options: Options, end: float | None) -> Cell:
    """One run. A failure is stored as a result, so that the other runs continue.

    Args:
        task: the run.
        options: of the command.
        end: the `time.time()` at which the time is up; that clock is the same in all processes.
    """
    deadline = Deadline(None if end is None else end - time.time())
    try:
        with at_its_best(device_of(options.device)):
            return paper_of(options.paper).train(task, options, deadline, options.out / UNFINISHED)
    except OutOfTimeError as error:
        return {"unfinished": True} | error.progress
    except MissingDataError as error:
        raise error.reason from None  # this ends the command
    except Exception as error:
        return {"failed": reason_of(error)}


def _prepare() -> None:
    """Set up a new process: one thread, since there are as many processes as cores, and warnings about slow steps."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    warnings.simplefilter("default", CaptureWarning)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process if the main process is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _pass_on(done: Future[Cell], given: Future[Cell]) -> None:
    error = done.exception()
    if error is None:
        given.set_result(done.result())
    else:
        given.set_exception(_lost(error) if isinstance(error, BrokenProcessPool) else error)


def _lost(error: BaseException) -> WorkersLostError:
    return WorkersLostError(
        f"A worker was killed ({type(error).__name__}), perhaps for lack of memory; finished runs are kept. "
        "Give fewer --workers; the same command continues where it stopped."
    )
