"""Several gloo processes on this machine, started once and given functions to run.

The processes are forks of a server that has imported torch and the tests: a start takes a second instead of ten.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class RankError(Exception):
    """A function raised on a rank; the message has the rank and the traceback."""


class World:
    """Processes that are ranks 0 .. size-1 of one process group."""

    def __init__(self, size: int) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["tests.distributed.jobs", "clipwise.distributed.sharded", "torch._dynamo"])
        self.size = size
        self.folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            here, there = context.Pipe()
            store = f"file://{self.folder.name}/store"
            process = context.Process(target=_serve, args=(rank, size, store, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = 120) -> list[Any]:
        """The results of `function(rank, *args)` on all ranks. Raises if one of them raised."""
        found = self.outcomes(function, *args, seconds=seconds)
        for rank, (_, error) in enumerate(found):
            if error is not None:
                raise RankError(f"rank {rank}: {error}")
        return [result for result, _ in found]

    def outcomes(self, function: Callable[..., Any], *args: Any, seconds: float = 120) -> list[tuple[Any, str | None]]:
        """(result, traceback) of `function(rank, *args)` on all ranks; (None, "ended") for one that was killed."""
        self.send(function, *args)
        return [self.receive(rank, seconds) for rank in range(self.size)]

    def send(self, function: Callable[..., Any], *args: Any) -> None:
        """Start `function(rank, *args)` on all ranks."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((function, args)))

    def receive(self, rank: int, seconds: float) -> tuple[Any, str | None]:
        """(result, traceback) of a function that was started on a rank."""
        try:
            if not self._pipes[rank].poll(seconds):
                return None, "hangs"
            found: tuple[Any, str | None] = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionError):
            return None, "ended"
        return found

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()
        self.folder.cleanup()


@contextmanager
def world(size: int) -> Iterator[World]:
    started = World(size)
    try:
        yield started
    finally:
        started.end()


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            break
        try:
            answer: tuple[Any, str | None] = function(rank, *args), None
        except Exception:
            answer = None, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(answer))
    os._exit(0)  # without waiting for other ranks, which may have been killed
