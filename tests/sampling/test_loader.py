"""What a training loop gets from the loader, and what the loader refuses."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from clipwise.errors import ConfigurationError, StepError
from clipwise.sampling.base import Scheme
from clipwise.sampling.fetch import Fetcher
from clipwise.sampling.loader import Piece, PrivateLoader
from clipwise.sampling.schemes import FixedSize, Full, Poisson, Shuffled, TruncatedPoisson

SIZE = 40


def ids(size: int = SIZE) -> TensorDataset:
    return TensorDataset(torch.arange(size))


class Dicts(Dataset[Any]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((3,), float(index)), "id": index}


class Engine:
    """The least that a loader needs: secrets after a position, which a complete batch advances."""

    def __init__(self, scheme: Scheme, dataset: Any = None, steps: int | None = None, **options: Any) -> None:
        self.scheme, self.steps, self.released = scheme, steps, 0
        fetcher = Fetcher(ids(scheme.dataset_size) if dataset is None else dataset)
        self.loader = PrivateLoader(scheme, fetcher, self.secrets, **options)

    def secrets(self) -> Iterator[tuple[bytes, bytes, int]]:
        for step in itertools.count(self.released):
            if step == self.steps:
                return
            epoch, slot = divmod(step, self.scheme.steps_per_epoch)
            yield sha256(b"step %d" % step).digest(), sha256(b"epoch %d" % epoch).digest(), slot

    def step(self) -> Piece:
        piece = self.loader.awaited()
        piece.consumed = True
        self.released += piece.last
        return piece

    def expected(self, step: int) -> list[int]:
        epoch, slot = divmod(step, self.scheme.steps_per_epoch)
        secrets = sha256(b"step %d" % step).digest(), sha256(b"epoch %d" % epoch).digest()
        return self.scheme.draw(*secrets, slot).tolist()


def epoch(engine: Engine) -> list[list[int]]:
    """One epoch, with the pieces of a batch joined."""
    batches: list[list[int]] = []
    for (batch,) in engine.loader.pieces():
        piece = engine.step()
        if piece.index_in_batch == 0:
            batches.append([])
        assert batch.tolist() == piece.indices.tolist()
        assert len(batch) == piece.size
        batches[-1] += batch.tolist()
    return batches


# -- epochs


@pytest.mark.parametrize("most", [None, 1, 3])
@pytest.mark.parametrize("scheme", [Poisson(SIZE, 0.1), FixedSize(SIZE, 7), Shuffled(SIZE, 7)])
def test_epochs_follow_each_other(scheme: Scheme, most: int | None) -> None:
    engine = Engine(scheme, max_physical_batch_size=most)
    seen = epoch(engine) + epoch(engine)
    assert len(seen) == engine.released == 2 * scheme.steps_per_epoch
    assert seen == [engine.expected(t) for t in range(len(seen))]


def test_an_epoch_that_was_left_continues_where_it_was() -> None:
    engine = Engine(Shuffled(SIZE, 7))
    first = []
    for (batch,) in engine.loader:
        engine.step()
        first += batch.tolist()
        if engine.released == 4:
            break
    assert sorted(first + [i for batch in epoch(engine) for i in batch]) == list(range(SIZE))
    assert engine.released == engine.scheme.steps_per_epoch


def test_the_run_may_end_within_an_epoch() -> None:
    engine = Engine(FixedSize(SIZE, 7), steps=8)
    assert [len(epoch(engine)) for _ in range(3)] == [6, 2, 0]


def test_length_is_the_number_of_steps_and_nothing_secret_is_shown() -> None:
    engine = Engine(Poisson(SIZE, 0.25), max_physical_batch_size=1)
    shown = {(repr(engine.loader), len(engine.loader))}
    for _ in engine.loader.pieces():
        shown.add((repr(engine.loader), len(engine.loader)))
        text = repr(engine.loader.current)
        assert text.startswith(f"Piece(step_offset={engine.released}, consumed=")
        engine.step()
    assert len(shown) == 1
    assert len(engine.loader) == 4


def test_pieces_mark_where_a_batch_begins_and_ends() -> None:
    engine = Engine(FixedSize(SIZE, 7), max_physical_batch_size=3)
    seen = []
    for _ in engine.loader.pieces():
        piece = engine.step()
        seen.append((piece.step_offset, piece.index_in_batch, piece.size, piece.last))
    step = [(0, 3, False), (1, 2, False), (2, 2, True)]
    assert seen == [(offset, *rest) for offset in range(6) for rest in step]


def test_prepare_is_called_once_for_every_batch() -> None:
    engine = Engine(FixedSize(SIZE, 7), prepare=lambda batch, piece: [batch[0] + 1000])
    for (batch,) in engine.loader:
        assert batch.tolist() == [i + 1000 for i in engine.step().indices]


# -- no batch is skipped


def test_a_peek_costs_nothing_and_changes_nothing() -> None:
    engine = Engine(Poisson(SIZE, 0.2))
    peeks = [next(iter(engine.loader))[0].tolist() for _ in range(3)]
    assert engine.released == 0
    seen = epoch(engine)
    assert peeks == [seen[0]] * 3
    assert seen == [engine.expected(t) for t in range(5)]


@pytest.mark.parametrize("before", [0, 2, 5])  # 5: the last batch of the epoch
def test_a_batch_cannot_be_skipped(before: int) -> None:
    engine = Engine(FixedSize(SIZE, 7))
    iterator = iter(engine.loader)
    for _ in range(before):
        next(iterator)
        engine.step()
    (kept,) = next(iterator)
    with pytest.raises(StepError, match=r"private\.step was not called"):
        next(iterator)
    assert next(iter(engine.loader))[0].tolist() == kept.tolist() == engine.expected(before)


def test_a_piece_cannot_be_skipped() -> None:
    engine = Engine(FixedSize(SIZE, 7), max_physical_batch_size=3)
    iterator = iter(engine.loader.pieces())
    next(iterator)
    engine.step()
    next(iterator)
    with pytest.raises(StepError, match="skipped"):
        next(iterator)


def test_a_batch_left_between_pieces_begins_again() -> None:
    engine = Engine(FixedSize(SIZE, 7), max_physical_batch_size=3)
    next(iter(engine.loader))
    engine.step()
    next(iter(engine.loader))
    assert engine.step().index_in_batch == 0


def test_a_newer_iterator_ends_the_older_ones() -> None:
    engine = Engine(FixedSize(SIZE, 7))
    running, unused = iter(engine.loader), iter(engine.loader)
    with pytest.raises(StepError, match="newer"):
        next(running)
    next(unused)
    engine.step()
    newest = iter(engine.loader)
    with pytest.raises(StepError, match="newer"):
        next(unused)
    next(newest)


def test_reset_ends_iterators_and_drops_the_batch() -> None:
    engine = Engine(FixedSize(SIZE, 7))
    iterator = iter(engine.loader)
    next(iterator)
    engine.loader.reset()
    with pytest.raises(StepError):
        engine.step()
    with pytest.raises(StepError):
        next(iterator)


def test_a_batch_is_consumed_once() -> None:
    engine = Engine(FixedSize(SIZE, 7))
    with pytest.raises(StepError, match="without a new batch"):
        engine.step()
    next(iter(engine.loader))
    engine.step()
    with pytest.raises(StepError, match="without a new batch"):
        engine.step()


# -- empty batches and workers


RARE = Poisson(SIZE, 0.02)  # an epoch of 50 steps, of which about 22 are empty


@pytest.mark.parametrize("workers", [0, 2])
def test_empty_batches_are_handed_out_like_others(workers: int) -> None:
    engine = Engine(RARE, dataset=Dicts(), num_workers=workers, max_physical_batch_size=2)
    sizes = []
    for batch in engine.loader.pieces():
        piece = engine.step()
        sizes.append(piece.size)
        assert batch["x"].shape == (piece.size, 3)
        assert batch["x"].dtype == torch.float32
        assert batch["id"].dtype == torch.int64
        assert batch["id"].tolist() == piece.indices.tolist()
    assert engine.released == 50
    assert 10 < sizes.count(0) < 35


def test_workers_change_nothing_but_the_process() -> None:
    plain = Engine(Poisson(SIZE, 0.1), max_physical_batch_size=3)
    ahead = Engine(Poisson(SIZE, 0.1), max_physical_batch_size=3, num_workers=2, prefetch_factor=3)
    peek = next(iter(ahead.loader.pieces()))[0].tolist()
    assert ahead.released == 0
    seen = epoch(ahead)
    assert seen == epoch(plain)
    assert seen[0][: len(peek)] == peek


def test_workers_hand_out_what_collate_fn_returned() -> None:
    fetcher = Fetcher(range(SIZE), collate_fn=np.array)
    loader = PrivateLoader(FixedSize(SIZE, 7), fetcher, lambda: iter([(b"step", b"epoch", 0)]), num_workers=1)
    batch = next(iter(loader))
    assert isinstance(batch, np.ndarray)
    assert batch.tolist() == loader.awaited().indices.tolist()


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
def test_pinned_batches_are_the_same() -> None:
    engine = Engine(Poisson(SIZE, 0.1), pin_memory=True)
    assert next(iter(engine.loader))[0].is_pinned() == torch.cuda.is_available()
    assert epoch(engine) == epoch(Engine(Poisson(SIZE, 0.1)))


# -- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_physical_batch_size": 0}, "max_physical_batch_size"),
        ({"max_physical_batch_size": 2.5}, "max_physical_batch_size"),
        ({"num_workers": -1}, "num_workers"),
        ({"prefetch_factor": 2}, "prefetch_factor"),
        ({"prefetch_factor": 0, "num_workers": 1}, "prefetch_factor"),
    ],
)
def test_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Engine(FixedSize(SIZE, 7), **options)


def test_refuses_a_scheme_for_another_number_of_records() -> None:
    with pytest.raises(ConfigurationError, match="dataset_size"):
        Engine(FixedSize(SIZE, 7), dataset=ids(SIZE + 1))


def test_an_empty_batch_that_cannot_be_made_is_refused_before_the_first_step() -> None:
    fetcher = Fetcher(ids(), collate_fn=lambda records: 1 / len(records))
    with pytest.raises(ConfigurationError, match="collate_fn"):
        PrivateLoader(Poisson(SIZE, 0.5), fetcher, lambda: iter(()))
    PrivateLoader(FixedSize(SIZE, 7), fetcher, lambda: iter(()))  # never empty: nothing to refuse


# -- cost


def test_a_batch_costs_little_more_than_its_indexing() -> None:
    engine = Engine(Poisson(60_000, 256 / 60_000), dataset=TensorDataset(torch.zeros(60_000, 1)))
    costs = []
    start = time.perf_counter()
    for _ in engine.loader:
        engine.step()
        costs.append(time.perf_counter() - start)
        start = time.perf_counter()
    assert np.median(costs) < 1e-3


# -- steps and pieces


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("most", [None, 3, 50])
@pytest.mark.parametrize("scheme", [Poisson(SIZE, 0.1), FixedSize(SIZE, 7), Shuffled(SIZE, 7)])
def test_a_loop_that_stops_after_len_items_has_made_one_epoch(scheme: Scheme, most: int | None, workers: int) -> None:
    engine = Engine(scheme, max_physical_batch_size=most, num_workers=workers)
    for _, item in zip(range(len(engine.loader)), engine.loader, strict=True):
        for piece in [item] if most is None else item:
            assert piece[0].tolist() == engine.step().indices.tolist()
    assert engine.released == scheme.steps_per_epoch


def test_both_ways_yield_the_same_pieces() -> None:
    nested, flat = (Engine(Poisson(SIZE, 0.25), max_physical_batch_size=3) for _ in range(2))
    by_step = [[(piece[0].tolist(), nested.step())[0] for piece in step] for step in nested.loader]
    in_a_row = [(piece[0].tolist(), flat.step())[0] for piece in flat.loader.pieces()]
    assert [piece for step in by_step for piece in step] == in_a_row
    assert len(by_step) == 4 and len(in_a_row) > 4


@pytest.mark.parametrize(
    ("scheme", "most", "length"),
    [
        (Poisson(SIZE, 0.25), 3, 4 * 14),  # ceil(40 / 3): every record may be drawn
        (Poisson(SIZE, 0.25), None, 4),
        (TruncatedPoisson(SIZE, 0.25, 20), 3, 4 * 7),
        (FixedSize(SIZE, 7), 3, 6 * 3),
        (Shuffled(SIZE, 7), 3, 6 * 3),
        (Full(SIZE), 7, 6),
    ],
)
def test_the_length_of_pieces_follows_from_public_numbers(scheme: Scheme, most: int | None, length: int) -> None:
    engine = Engine(scheme, max_physical_batch_size=most)
    assert len(engine.loader.pieces()) == length
    handed_out = sum(engine.step() is not None for _ in engine.loader.pieces())
    assert handed_out <= length == len(engine.loader.pieces())


def test_a_loop_over_steps_that_takes_them_for_batches_gets_an_error_about_pieces() -> None:
    engine = Engine(FixedSize(SIZE, 7), max_physical_batch_size=10)  # one piece per step, here
    with pytest.raises(StepError, match=r"loader\.pieces\(\)"):
        for _x, _y in engine.loader:
            pass
    assert engine.released == 0


def test_a_step_cannot_be_left_before_its_last_piece() -> None:
    engine = Engine(FixedSize(SIZE, 7), max_physical_batch_size=3)
    steps = iter(engine.loader)
    next(next(steps))
    engine.step()
    with pytest.raises(StepError, match="last piece"):
        next(steps)


def test_a_newer_iterator_ends_the_pieces_of_a_step() -> None:
    engine = Engine(FixedSize(SIZE, 7), max_physical_batch_size=3)
    pieces = next(iter(engine.loader))
    next(pieces)
    engine.step()
    iter(engine.loader)
    with pytest.raises(StepError, match="newer"):
        next(pieces)
