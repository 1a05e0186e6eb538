"""The loader: yields every batch of an epoch exactly once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

from torch.utils.data import DataLoader

from clipwise.errors import ConfigurationError, StepError
from clipwise.sampling.base import Indices, Scheme
from clipwise.sampling.fetch import Fetcher
from clipwise.sampling.generators import generator_from, seed_global_generators
from clipwise.sampling.microbatches import WHOLE, BySize, Cut
from clipwise.validation.arguments import whole

# For each step from the next unreleased one on: its secret, its epoch's secret and its slot in that epoch. Iterating
# has no side effects.
Secrets = Callable[[], Iterator[tuple[bytes, bytes, int]]]


@dataclass(eq=False)
class Piece:
    """The last piece that was yielded. Fields that depend on the draw are secret and not shown."""

    step_offset: int  # steps between the start of the iterator and this piece's step
    # 0 begins a batch, possibly one that was begun before: its earlier sums must be dropped, or records count twice.
    index_in_batch: int = field(repr=False)
    size: int = field(repr=False)
    last: bool = field(repr=False)  # whether it is the last piece of its batch
    indices: Indices = field(repr=False)  # the records in it
    consumed: bool = False  # whether the training loop has used it
    number: int = field(default=0, repr=False)  # among the pieces of the batch on all ranks
    check: int = field(default=0, repr=False)  # a digest of the whole draw, to compare with other ranks; 0 for one rank


class PrivateLoader:
    """An iterable over the steps of the current epoch that are not yet released.

    A batch that was fetched without a step (`next(iter(loader))`) is drawn again by the next iterator, so no batch can
    be skipped because of its data. A new iterator ends the older ones.

    It yields one item per step: the batch or, where a step can come in several pieces (`max_physical_batch_size`,
    several microbatches, users), an iterator over the pieces of that step. `pieces()` iterates over the pieces of all
    steps in one loop. The number of pieces is as secret as the batch size, so no `len` depends on it.

    Args:
        scheme: draws the batches.
        fetcher: makes a batch from indices.
        secrets: the secrets of the coming steps.
        max_physical_batch_size: the most records per piece; None for whole batches.
        cut: cuts a batch into microbatches, which are its pieces; instead of `max_physical_batch_size`.
        num_workers: the number of worker processes; 0 fetches in this process.
        pin_memory: yield batches in page-locked memory, for faster copies to an accelerator.
        prefetch_factor: the number of pieces that each worker fetches ahead.
        prepare: applied to each batch and its piece just before it is yielded.
        rank, ranks: this process and the number of processes. All of them draw the same batch, and each yields its own
            records. All yield the same number of pieces.
        kept: returns the units of a draw that an audit keeps.
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
        rank: int = 0,
        ranks: int = 1,
        kept: Callable[[Indices], Indices] | None = None,
    ) -> None:
        self._cut = BySize(max_physical_batch_size) if cut is None else cut
        if scheme.dataset_size != self._cut.units(fetcher.dataset_size):
            raise ConfigurationError("dataset_size of the scheme is not the length of the data set.")
        whole("num_workers", num_workers, least=0)
        if prefetch_factor is not None:
            whole("prefetch_factor", prefetch_factor, least=1)
            if num_workers == 0:
                raise ConfigurationError("prefetch_factor needs num_workers above 0: leave it out.")
        if scheme.has_random_size or self._cut.may_be_empty or ranks > 1 or kept is not None:
            fetcher.empty()  # any batch may be empty: raise before the first step if it cannot be made
        self.current: Piece | None = None
        self.is_fetching = False  # whether a fetch is in progress or has failed
        self._scheme, self._steps_per_epoch = scheme, scheme.steps_per_epoch
        self.fetcher = fetcher
        self._secrets = secrets
        self.max_physical_batch_size = max_physical_batch_size
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        self._prefetch_factor = prefetch_factor
        self._prepare = prepare
        self._rank, self._ranks, self._kept = rank, ranks, kept
        self._turn = 0
        # Depends on the arguments only, so that the same training loop works for every batch size.
        self._yields_pieces = max_physical_batch_size is not None or self._cut.most_pieces(scheme.largest_size) > 1

    def __len__(self) -> int:
        return self._steps_per_epoch

    def pieces(self, max_physical_batch_size: int | None = None) -> Pieces:
        """Iterate over the pieces of all steps of the epoch in one loop; over whole batches where none is cut.

        `private.step` returns True after the last piece of a step. The length is an upper bound.

        Args:
            max_physical_batch_size: the most records per piece in this iteration; by default that of `make_private`.
        """
        if max_physical_batch_size is None:
            return Pieces(self, self._cut)
        if not isinstance(self._cut, BySize):
            raise ConfigurationError(
                "max_physical_batch_size cannot cut the microbatches of this run: each is clipped as a whole."
            )
        return Pieces(self, BySize(max_physical_batch_size))

    def __repr__(self) -> str:
        return f"PrivateLoader(scheme={self._scheme!r}, steps_per_epoch={len(self)})"

    def __iter__(self) -> Iterator[Any]:
        self.reset()
        return self._steps(self._turn) if self._yields_pieces else self._hand_out(self._turn, self._cut)

    def reset(self) -> None:
        """Forget the current piece and end every iterator: a new one starts at the next step."""
        self._turn += 1
        self.current, self.is_fetching = None, False

    def upcoming(self) -> list[Indices]:
        """The indices of each piece of the next step, in the order in which a new iterator yields them."""
        found: list[Indices] = []
        for piece in self._schedule(self._cut):
            found.append(piece.indices)
            if piece.last:
                break
        return found

    def awaited(self) -> Piece:
        """The piece that was yielded and not yet used by a step."""
        if self.current is None or self.current.consumed:
            raise StepError(
                "private.step was called without a new batch: call it once for each batch of private.loader, with the "
                "losses of that batch."
            )
        return self.current

    @property
    def is_awaiting(self) -> bool:
        """Whether a piece was yielded and not yet used by a step."""
        return self.current is not None and not self.current.consumed

    def _steps(self, turn: int) -> Iterator[Iterator[Any]]:
        handed_out = self._hand_out(turn, self._cut)
        for first in handed_out:
            yield self._pieces_of_step(turn, first, handed_out)
            self._require_turn(turn)
            if self.current is not None and not self.current.last:
                raise StepError(
                    "A step was left before its last piece. Each item of private.loader is an iterator over the pieces "
                    "of one step: call private.step on every piece before the next item is taken."
                )

    def _pieces_of_step(self, turn: int, first: Any, handed_out: Iterator[Any]) -> Iterator[Any]:
        yield first
        while True:
            self._require_turn(turn)
            piece = self.current
            if piece is None or not piece.consumed:
                raise StepError(
                    "A piece was drawn but private.step was not called on it. In this run a step can come in several "
                    "pieces, so each item of private.loader is an iterator over the pieces of one step: loop over it "
                    "as well, or write `for batch in private.loader.pieces()` for one loop over all of them."
                )
            if piece.last:
                return
            yield next(handed_out)

    def _hand_out(self, turn: int, cut: Cut) -> Iterator[Any]:
        self._require_turn(turn)
        if self._num_workers or self._pin_memory:
            fetched = self._fetch_ahead(cut)
        else:
            fetched = ((piece, self.fetcher[piece.indices]) for piece in self._schedule(cut))
        self.is_fetching = True
        for piece, batch in fetched:
            if self._prepare is not None:
                batch = self._prepare(batch, piece)
            self.current, self.is_fetching = piece, False
            yield batch
            self._require_turn(turn)
            if not piece.consumed:
                raise StepError(
                    "The previous batch was drawn but private.step was not called on it: batches may not be "
                    "skipped because of their data. Call private.step(losses) on every batch, in place of "
                    "loss.backward() and optimizer.step(). To look at a batch, use next(iter(loader))."
                )
            self.is_fetching = True
        self.is_fetching = False

    def _require_turn(self, turn: int) -> None:
        if turn != self._turn:
            raise StepError(
                "This iterator of private.loader has ended because a newer one was begun or the state of the run was "
                "reset: continue with the newest, or begin another."
            )

    def _schedule(self, cut: Cut) -> Iterator[Piece]:
        for offset, (step_secret, epoch_secret, slot) in enumerate(self._secrets()):
            indices = self._scheme.draw(step_secret, epoch_secret, slot)
            if self._kept is not None:
                indices = self._kept(indices)
            is_whole, check = self._ranks == 1 and cut == WHOLE, 0
            parts = [indices] if is_whole else cut.of_rank(indices, self._rank, self._ranks)
            if self._ranks > 1:
                check = int.from_bytes(blake2b(indices.tobytes(), digest_size=7).digest(), "little")
            for i, part in enumerate(parts):
                number = i * self._ranks + self._rank
                yield Piece(offset, i, len(part), last=i == len(parts) - 1, indices=part, number=number, check=check)
            if slot + 1 >= self._steps_per_epoch:
                return

    def _fetch_ahead(self, cut: Cut) -> Iterator[tuple[Piece, Any]]:
        """The pieces and their batches through a `DataLoader`, which requests pieces ahead and keeps their order."""
        requested: deque[Piece] = deque()
        rank = self._rank.to_bytes(8, "little")
        secret = blake2b(next(self._secrets())[0] + rank, digest_size=32, person=b"clipwise.workers").digest()

        def request() -> Iterator[Indices]:
            for piece in self._schedule(cut):
                requested.append(piece)
                yield piece.indices

        batches = DataLoader(
            self.fetcher,
            batch_size=None,
            sampler=request(),
            collate_fn=_as_fetched,
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            prefetch_factor=self._prefetch_factor,
            worker_init_fn=partial(_seed_worker, secret),
            generator=generator_from(secret),  # by default workers are seeded from torch's global seed
        )
        for batch in batches:
            yield requested.popleft(), batch


def _seed_worker(secret: bytes, number: int) -> None:
    """Seed the random draws of a data set in this worker, such as augmentations, from the run's key."""
    seed_global_generators(blake2b(number.to_bytes(8, "little"), digest_size=32, key=secret).digest())


class Pieces:
    """The pieces of all remaining steps of an epoch, with a public upper bound as the length.

    Under Poisson sampling a batch may hold every record, so an epoch usually has far fewer pieces.
    """

    def __init__(self, loader: PrivateLoader, cut: Cut) -> None:
        self._loader, self._cut = loader, cut

    def __len__(self) -> int:
        return len(self._loader) * self._cut.most_pieces(self._loader._scheme.largest_size)

    def __iter__(self) -> Iterator[Any]:
        self._loader.reset()
        return self._loader._hand_out(self._loader._turn, self._cut)


def _as_fetched(batch: Any) -> Any:
    return batch
