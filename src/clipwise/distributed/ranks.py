"""The ranks of a private run and the messages between them.

All messages are one collective, `exchange`: every rank sends the name of its phase and a note. So the next message
detects ranks that are at different places of the training loop, and names a rank that fails. Messages use a gloo group
of the run, with its own timeout. A rank that fails writes its reason to the store of torch.distributed, where waiting
ranks read it.

Data collectives (distributed/sums.py, and the all-gathers of FSDP2) start only after a message, so a rank that is
missing is found by the message and not by a collective of the device.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import wraps
from hashlib import blake2b
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from clipwise import errors
from clipwise.errors import BudgetExhausted, ClipwiseError, DistributedError

P = ParamSpec("P")
T = TypeVar("T")

DEFAULT_TIMEOUT = 600.0  # seconds
_LOOK_EVERY = 0.25  # seconds between checks for the failure of another rank
_LONGEST_PAUSE = 0.002
_PHASES = {  # what a rank does, for messages
    "set-up": "sets up its private run",
    "draw": "draws a batch",
    "step": "takes a step",
    "end-of-epoch": "is at the end of an epoch",
    "state": "saves or loads the state of its run",
    "close": "closes its private run",
}
_ORDER = tuple(_PHASES)


class Work(Protocol):
    """A running collective."""

    def is_completed(self) -> bool: ...
    def wait(self) -> object: ...


class OneRank:
    """The ranks of a run in one process. No message is sent."""

    rank, count = 0, 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which has the ledger and the resume file."""
        return self.rank == 0

    @property
    def is_broken(self) -> bool:
        """Whether a rank has failed: no more messages are possible."""
        return False

    def exchange(self, phase: str, note: bytes = b"", check: int = 0) -> list[bytes]:
        """The notes of all ranks, in order."""
        return [note]

    def from_rank_0(self, make: Callable[[], T], phase: str = "set-up") -> T:
        """`make()` of rank 0. If it raises there, every rank raises."""
        return make()

    def fail(self, error: BaseException) -> None:
        """Report to the other ranks that this one has failed. Does not wait for them."""

    def end(self) -> None:
        """End the messages of the run."""


class Ranks(OneRank):
    """The ranks of a run in several processes.

    Args:
        timeout: the number of seconds to wait for the other ranks.
    """

    def __init__(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        from torch._C._distributed_c10d import PrefixStore  # a build of torch may lack it

        self.rank, self.count, self.timeout = dist.get_rank(), dist.get_world_size(), timeout
        self._broken = ""
        self.group_timeout = timedelta(seconds=timeout)
        self.group = dist.new_group(backend="gloo", timeout=self.group_timeout)
        self._store = PrefixStore(
            f"clipwise/{len(_BEGUN)}",  # every rank makes its runs in the same order
            dist.distributed_c10d._get_default_store(),  # no public function returns it
        )
        _BEGUN.append(ref(self))

    @property
    def is_broken(self) -> bool:
        return bool(self._broken)

    def exchange(self, phase: str, note: bytes = b"", check: int = 0) -> list[bytes]:
        """The notes of all ranks, in order. Raises on every rank if phases or `check` differ."""
        if self._broken:
            raise DistributedError(self._broken)
        mine = torch.tensor([_ORDER.index(phase), check, len(note)])
        heads = self._gathered(mine)
        phases = [_ORDER[int(head[0])] for head in heads]
        if len(set(phases)) > 1:
            other = next(rank for rank, name in enumerate(phases) if name != phase)
            self._stop(
                f"Rank {other} {_PHASES[phases[other]]} while rank {self.rank} {_PHASES[phase]}: the training loops of "
                "the ranks differ. Every rank must take every step of private.loader, and call state_dict, "
                "load_state_dict and close as the others do."
            )
        if any(bool(head[1] != heads[0][1]) for head in heads):
            self._stop(
                "The ranks do not have the same arguments, or drew different batches. Give make_private the same "
                "arguments, data set and versions of torch and numpy on every rank."
            )
        longest = max(int(head[2]) for head in heads)
        if not longest:
            return [b""] * self.count
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(note)] = torch.frombuffer(bytearray(note), dtype=torch.uint8) if note else padded[:0]
        notes = self._gathered(padded)
        return [bytes(each[: int(head[2])].tolist()) for each, head in zip(notes, heads, strict=True)]

    def from_rank_0(self, make: Callable[[], T], phase: str = "set-up") -> T:
        found: Any = None
        problem: BaseException | None = None
        if self.is_first:
            try:
                found = make()
            except Exception as error:
                problem = error
        note = pickle.dumps((found, _described(problem))) if self.is_first else b""
        found, refusal = pickle.loads(self.exchange(phase, note)[0])
        if problem is not None:
            raise problem
        if refusal is not None:
            kind, message = refusal
            raise getattr(errors, kind, DistributedError)(message)
        return found  # type: ignore[no-any-return]

    def fail(self, error: BaseException) -> None:
        if self._broken or isinstance(error, BudgetExhausted):
            return
        kind, message = _described(error) or ("", "")
        # Messages of other code may hold data.
        text = f"Rank {self.rank} has stopped: {message if isinstance(error, ClipwiseError) else kind}"
        self._broken = text
        with suppress(RuntimeError):
            self._store.set("failed", text)

    def end(self) -> None:
        if not self._broken:
            self._broken = "This private run is closed."
            with suppress(RuntimeError, ValueError):
                dist.destroy_process_group(self.group)

    def wait(self, work: Work | None, is_lazy: bool = False) -> None:
        """Wait for a collective on the CPU. Raises if a rank fails, ends, or takes longer than the timeout.

        `is_lazy`: the collective makes progress only while it is waited for, with the timeout of its own group.
        """
        if work is None:
            return
        start, pause, look = time.monotonic(), 2e-5, _LOOK_EVERY
        try:
            while not is_lazy and not work.is_completed():
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                waited = time.monotonic() - start
                if waited > look:
                    look += _LOOK_EVERY
                    self._look_for_failure()
                if waited > self.timeout:
                    self._stop(
                        f"Rank {self.rank} has waited {self.timeout:g} seconds for the other ranks: one of them hangs, "
                        "or is much slower. make_private(..., rank_timeout=seconds) sets the limit."
                    )
            work.wait()
        except RuntimeError as error:
            self._look_for_failure()
            self._stop(
                "Another rank has ended, or cannot be reached. Nothing more is released. Start all ranks again; the "
                "ledger counts every release.",
                error,
            )

    def _gathered(self, mine: Tensor) -> list[Tensor]:
        found = [torch.empty_like(mine) for _ in range(self.count)]
        try:
            work = dist.all_gather(found, mine, group=self.group, async_op=True)
        except RuntimeError as error:  # a connection that is already closed
            self._look_for_failure()
            self._stop("Another rank has ended, or cannot be reached.", error)
        self.wait(work)
        return found

    def _look_for_failure(self) -> None:
        with suppress(RuntimeError):  # rank 0 may have ended, and the store with it
            if self._store.check(["failed"]):
                self._stop(self._store.get("failed").decode())

    def _stop(self, message: str, cause: BaseException | None = None) -> NoReturn:
        self._broken = message
        raise DistributedError(message) from cause


_BEGUN: list[ref[Ranks]] = []  # the runs of this process


def reporting_set_up(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function that begins a run report its errors to the other ranks, which would otherwise wait for it."""

    @wraps(function)
    def reporting(*args: P.args, **kwargs: P.kwargs) -> T:
        before = len(_BEGUN)
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            for begun in _BEGUN[before:]:
                if (ranks := begun()) is not None:
                    ranks.fail(error)
            raise

    return reporting


def _described(error: BaseException | None) -> tuple[str, str] | None:
    return None if error is None else (type(error).__name__, str(error))


def ranks_of_process(timeout: float | None) -> OneRank:
    """The ranks of this process: several if torch.distributed is initialised with more than one."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return Ranks(DEFAULT_TIMEOUT if timeout is None else timeout)
    return OneRank()


def digest_of(*values: object) -> int:
    """A digest of values that must be the same on all ranks, by their `repr`."""
    return int.from_bytes(blake2b(repr(values).encode(), digest_size=7).digest(), "little")
