"""Processes that train, each of which reads its data once."""

from __future__ import annotations

import multiprocessing
import warnings
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from clipwise.bench.environment import at_its_best, device_of
from clipwise.bench.limits import Deadline, reason_of
from clipwise.errors import ConfigurationError
from clipwise.reproduce.normalization import sets
from clipwise.reproduce.normalization.setting import Setting
from clipwise.reproduce.normalization.training import OutOfTimeError, train
from clipwise.reproduce.store import Cell


class Task(NamedTuple):
    """One run: a setting, the part that it is judged by ("validation" or "test"), and a seed."""

    setting: Setting
    judged_by: str
    seed: int


class Workers:
    """Runs tasks: in this process if there is one worker, else in as many others.

    Processes are started afresh and not forked: CUDA cannot be taken along. Each has one thread.
    """

    def __init__(self, count: int, data: Path | None, device: str, deadline: Deadline) -> None:
        if count < 1:
            raise ConfigurationError(f"workers={count} is not possible: use 1 or more.")
        self._where = data, device, deadline
        self._pool: ProcessPoolExecutor | None = None
        if count > 1:
            self._pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _prepare)

    def start(self, task: Task) -> Future[Cell | None]:
        """The run's result, later; None if the time was up before its end."""
        if self._pool is not None:
            return self._pool.submit(run, task, *self._where)
        done: Future[Cell | None] = Future()
        done.set_result(run(task, *self._where))
        return done

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _prepare() -> None:
    """A new process: one thread, since there are about as many processes as cores; no warnings from each."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def run(task: Task, data: Path | None, device: str, deadline: Deadline) -> Cell | None:
    """One run, wherever this is called."""
    setting = task.setting
    where = device_of(device)
    # If data are missing the command ends: that is no result.
    parts = _sets(setting.data, setting.side, data, where, task.judged_by, setting.is_private)
    rows = _rows(setting.data, setting.side, data, where) if setting.needs_public_rows else None
    # Batches of one size can be tuned for. Private ones vary, and each size would be tuned anew.
    tuned = nullcontext() if setting.is_private else at_its_best(where)
    try:
        with tuned:
            return train(setting, parts, rows, task.seed, deadline)
    except OutOfTimeError:
        return None
    except Exception as error:  # a run that is refused is a result too, and must not end the others
        return {"failed": reason_of(error)}


@lru_cache(maxsize=2)
def _sets(
    name: str, side: int, data: Path | None, device: torch.device, judged_by: str, is_private: bool
) -> sets.Sets:
    return sets.load(name, side, data, device, judged_by=judged_by, trains_on_all=is_private)


@lru_cache(maxsize=2)
def _rows(name: str, side: int, data: Path | None, device: torch.device) -> Tensor:
    return sets.public_rows(name, side, data, device)
