"""Hands out the batches of an epoch, each of them once, none of them skipped."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader

from clipwise.errors import ConfigurationError, StepError
from clipwise.sampling.fetch import Fetcher
from clipwise.sampling.mini_sets import BySize, Cut
from clipwise.sampling.schemes import Indices, Scheme, whole

# For the next unreleased step, then the one after, and so on: its secret, its epoch's secret and its
# slot in that epoch. Looking ahead changes nothing.
Secrets = Callable[[], Iterator[tuple[bytes, bytes, int]]]


@dataclass(eq=False)
class Piece:
    """What was handed out last. What tells of the draw is secret and not shown.

    Args:
        step_offset: the number of steps between the start of the iterator and this piece's step.
        index_in_batch: the piece's place in its batch. 0 begins a batch, perhaps one that was begun
            before and left: what was gathered of it must be dropped, or a record would count twice.
        size: the number of records in this piece.
        last: whether it ends its batch.
        indices: the records in it.
        consumed: whether the training loop has used it.
    """

    step_offset: int
    index_in_batch: int = field(repr=False)
    size: int = field(repr=False)
    last: bool = field(repr=False)
    indices: Indices = field(repr=False)
    consumed: bool = False


class PrivateLoader:
    """An iterable whose every `iter` gives the steps of the current epoch that are not yet released.

    The batch of a step follows from the step's secret. A batch that was looked at but not stepped on
    (`next(iter(loader))`) is drawn again by the next iterator, so looking costs nothing; and no batch
    can be passed over because of what it holds. A new iterator ends the older ones.

    Its length is the number of steps in an epoch. With `max_physical_batch_size`, or by mini-sets, a step may come
    in several pieces; how many, if that is left to chance, is as secret as the size drawn, and neither is ever shown.

    Args:
        scheme: who is in a batch.
        fetcher: from indices to a batch.
        secrets: the secrets of the steps to come.
        max_physical_batch_size: the most records to hand out at a time; None for whole batches.
        cut: how a batch is cut into mini-sets, which are its pieces; instead of `max_physical_batch_size`.
        num_workers: processes that fetch ahead; 0 fetches in this one.
        pin_memory: hand out batches in page-locked memory, for faster copies to an accelerator.
        prefetch_factor: pieces that each worker fetches ahead.
        prepare: applied to each batch, with its piece, just before it is handed out.
    """

    def __init__(
        self,
        scheme: Scheme,
        fetcher: Fetcher,
        secrets: Secrets,
        *,
        max_physical_batch_size: int | None = None,
        cut: Cut | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        prepare: Callable[[Any, Piece], Any] | None = None,
    ) -> None:
        self._cut = BySize(max_physical_batch_size) if cut is None else cut
        if scheme.dataset_size != self._cut.units(fetcher.dataset_size):
            raise ConfigurationError("dataset_size of the scheme is not the length of the data set.")
        whole("num_workers", num_workers, least=0)
        if prefetch_factor is not None:
            whole("prefetch_factor", prefetch_factor, least=1)
            if num_workers == 0:
                raise ConfigurationError("prefetch_factor needs num_workers above 0: leave it out.")
        if scheme.has_random_size or self._cut.may_be_empty:
            fetcher.empty()  # it may be drawn at any step: if it cannot be made, say so before the first
        self.current: Piece | None = None
        self._scheme = scheme
        self._fetcher = fetcher
        self._secrets = secrets
        self.max_physical_batch_size = max_physical_batch_size
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        self._prefetch_factor = prefetch_factor
        self._prepare = prepare
        self._turn = 0

    def __len__(self) -> int:
        return self._scheme.steps_per_epoch

    def __repr__(self) -> str:
        return f"PrivateLoader(scheme={self._scheme!r}, steps_per_epoch={len(self)})"

    def __iter__(self) -> Iterator[Any]:
        self.reset()
        return self._hand_out(self._turn)

    def reset(self) -> None:
        """Forget what was handed out and end every iterator: the next one starts at the next step."""
        self._turn += 1
        self.current = None

    def awaited(self) -> Piece:
        """The piece that was handed out and whose losses are due."""
        if self.current is None or self.current.consumed:
            raise StepError(
                "private.step was called without a new batch: call it once for each batch that "
                "private.loader hands out, with the losses of that batch."
            )
        return self.current

    @property
    def is_awaiting(self) -> bool:
        """Whether a piece was handed out whose losses are due."""
        return self.current is not None and not self.current.consumed

    @property
    def is_mixing_possible(self) -> bool:
        """Whether code of the user's sees several records at once before the batch is handed out."""
        return self._fetcher.is_mixing_possible

    def arrangements(self, piece: Piece) -> list[Callable[[Sequence[int]], Any]]:
        """See `Fetcher.arrangements`."""
        return self._fetcher.arrangements(piece.indices)

    def consume(self) -> Piece:
        """Mark the current piece as used, once, and return it."""
        piece = self.awaited()
        piece.consumed = True
        return piece

    def _hand_out(self, turn: int) -> Iterator[Any]:
        self._require_turn(turn)
        fetched = self._fetch_ahead() if self._num_workers or self._pin_memory else self._fetch()
        for piece, batch in fetched:
            if self._prepare is not None:
                batch = self._prepare(batch, piece)
            self.current = piece
            yield batch
            self._require_turn(turn)
            if not piece.consumed:
                raise StepError(
                    "The previous batch was drawn but private.step was not called on it: a batch may not be "
                    "skipped by what it holds. Step on every batch; to look at one, use next(iter(loader))."
                )

    def _require_turn(self, turn: int) -> None:
        if turn != self._turn:
            raise StepError(
                "This iterator of private.loader has ended because a newer one was begun or the state of the "
                "run was set anew: go on with the newest, or begin another."
            )

    def _schedule(self) -> Iterator[Piece]:
        """The rest of the epoch, in pieces."""
        for offset, (step_secret, epoch_secret, slot) in enumerate(self._secrets()):
            indices = self._scheme.draw(step_secret, epoch_secret, slot)
            parts = self._cut(indices)
            for i, part in enumerate(parts):
                yield Piece(offset, i, len(part), last=i == len(parts) - 1, indices=part)
            if slot + 1 >= self._scheme.steps_per_epoch:
                return

    def _fetch(self) -> Iterator[tuple[Piece, Any]]:
        for piece in self._schedule():
            yield piece, self._fetcher[piece.indices]

    def _fetch_ahead(self) -> Iterator[tuple[Piece, Any]]:
        """The same, through a `DataLoader`, which asks for pieces before it gives earlier ones, in order."""
        asked: deque[Piece] = deque()

        def ask() -> Iterator[Indices]:
            for piece in self._schedule():
                asked.append(piece)
                yield piece.indices

        batches = DataLoader(
            self._fetcher,
            batch_size=None,
            sampler=ask(),
            collate_fn=_as_fetched,
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            prefetch_factor=self._prefetch_factor,
        )
        arriving = iter(batches)
        while True:
            try:
                batch = next(arriving)
            except StopIteration:
                return
            except (RuntimeError, EOFError, ConnectionError) as error:
                if not _is_of_a_dead_worker(error):
                    raise
                raise StepError(
                    "A worker process of private.loader has died (killed, or out of memory). Nothing was released "
                    "for the batch that it fetched: loop over private.loader again to go on, perhaps with a smaller "
                    "num_workers."
                ) from error
            yield asked.popleft(), batch


def _is_of_a_dead_worker(error: Exception) -> bool:
    """Torch has no type of its own for it: it names the process, or the pipe to it breaks.

    An error of the data set itself comes with words of torch's ("Caught ... in DataLoader worker process ...").
    """
    if isinstance(error, RuntimeError):
        return "DataLoader worker (pid" in str(error)
    return not str(error).startswith("Caught ")


def _as_fetched(batch: Any) -> Any:
    return batch
