"""From indices to batches: the fast path, other data sets, empty batches, pieces."""

from __future__ import annotations

from collections import UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from clipwise.errors import ConfigurationError
from clipwise.sampling.fetch import Fetcher
from clipwise.sampling.microbatches import BySize

NONE = np.empty(0, dtype=np.int64)
SOME = np.array([1, 4, 5])
Pair = namedtuple("Pair", ["left", "right"])


def same(a: Any, b: Any) -> bool:
    """Equal values, and equal types, shapes and dtypes at every level."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def tensors(size: int = 8) -> TensorDataset:
    return TensorDataset(torch.arange(size * 6.0).reshape(size, 2, 3), torch.arange(size))


class Records(Dataset[Any]):
    """Builds each record from its index."""

    def __init__(self, build: Any, size: int = 8) -> None:
        self.build, self.size = build, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        assert type(index) is int
        return self.build(index)


# -- records


def test_tensor_dataset_gives_what_a_data_loader_gives() -> None:
    dataset = tensors()
    expected = next(iter(DataLoader(Subset(dataset, SOME.tolist()), batch_size=len(SOME))))
    assert same(Fetcher(dataset)[SOME], expected)


def test_tensor_dataset_is_indexed_without_reading_single_records(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: TensorDataset, index: int) -> Any:
        raise AssertionError("a record was fetched")

    monkeypatch.setattr(TensorDataset, "__getitem__", refuse)
    dataset = tensors()
    assert Fetcher(dataset)[SOME][1].tolist() == SOME.tolist()
    with pytest.raises(AssertionError, match="a record was fetched"):
        Fetcher(dataset, collate_fn=default_collate)[SOME]


def test_a_subclass_of_tensor_dataset_keeps_its_own_records() -> None:
    class Negated(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return tuple(-t[index] for t in self.tensors)

    assert Fetcher(Negated(*tensors().tensors))[SOME][1].tolist() == [-1, -4, -5]


def test_a_batch_is_a_copy() -> None:
    dataset = tensors()
    Fetcher(dataset)[np.arange(8)][0].zero_()
    assert dataset.tensors[0].abs().sum() > 0


def test_other_data_sets_are_collated_record_by_record() -> None:
    dataset = Records(lambda i: {"x": torch.full((2,), float(i)), "y": i, "name": f"r{i}"})
    expected = default_collate([dataset[i] for i in SOME.tolist()])
    assert same(Fetcher(dataset)[SOME], expected)


def test_a_data_set_may_give_many_records_at_once() -> None:
    class Many(Records):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            asked.append(indices)
            return [self.build(i) for i in indices]

    asked: list[list[int]] = []
    assert Fetcher(Many(lambda i: torch.tensor(i)))[SOME].tolist() == [1, 4, 5]
    assert asked == [[1, 4, 5]]


def test_collate_fn_takes_the_place_of_the_default() -> None:
    fetcher = Fetcher(tensors(), collate_fn=lambda records: torch.stack([x.sum() for x, _ in records]))
    assert fetcher[SOME].tolist() == [6.0 * (6 * i) + 15 for i in SOME.tolist()]


class Endless(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("dataset", [Endless(), iter([1, 2]), {1, 2}, None, (i for i in range(3))])
def test_a_data_set_without_length_or_index_is_refused(dataset: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"dataset is a \w+, which has no length"):
        Fetcher(dataset)


# -- empty batches


@pytest.mark.parametrize(
    "build",
    [
        lambda i: (torch.full((2, 3), float(i)), i),
        lambda i: {"ids": torch.tensor([i, i]), "mask": torch.tensor(True), "y": float(i)},
        lambda i: ((torch.zeros(3), [torch.zeros(1), i]), {"a": {"b": torch.zeros(2, dtype=torch.int8)}}),
        lambda i: Pair(torch.zeros(1), Pair(np.float32(i), np.zeros((1, 2)))),
        lambda i: torch.zeros(0, 1),
        lambda i: torch.tensor(i),
    ],
)
def test_empty_batch_is_any_batch_without_its_rows(build: Any) -> None:
    def without_rows(batch: Any) -> Any:
        if isinstance(batch, torch.Tensor):
            return batch[:0]
        if isinstance(batch, dict):
            return {key: without_rows(v) for key, v in batch.items()}
        if isinstance(batch, Pair):
            return Pair(*map(without_rows, batch))
        return type(batch)(map(without_rows, batch))

    fetcher = Fetcher(Records(build))
    assert same(fetcher[NONE], without_rows(fetcher[SOME]))


def test_empty_batch_of_a_tensor_dataset() -> None:
    x, y = Fetcher(tensors())[NONE]
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((0, 2, 3), torch.float32, (0,), torch.int64)


def test_empty_batch_has_no_names() -> None:
    assert same(Fetcher(Records(lambda i: {"name": f"r{i}"}))[NONE], {"name": []})
    assert same(Fetcher(Records(lambda i: (i, f"r{i}")))[NONE], [torch.zeros(0, dtype=torch.int64), ()])


def test_empty_batch_of_a_custom_collate() -> None:
    """Images in a stack, targets in a list with one entry per record, and sequences time-first."""

    def collate(records: list[Any]) -> Any:
        images, boxes, words = zip(*records, strict=True)
        return torch.stack(images), list(boxes), pad_sequence(words), None

    build = lambda i: (torch.zeros(2, 2), {"box": torch.zeros(1, 4)}, torch.zeros(5 + i))  # noqa: E731
    images, boxes, words, nothing = Fetcher(Records(build), collate)[NONE]
    assert images.shape == (0, 2, 2)
    assert boxes == []
    assert words.shape == (5, 0)
    assert nothing is None


def test_empty_batch_of_a_collate_that_takes_records_apart() -> None:
    def collate(records: list[dict[str, Any]]) -> Any:
        labels = [r.pop("y") for r in records]
        return {**default_collate(records), "labels": torch.tensor(labels)}

    held = [{"x": torch.zeros(3), "y": i} for i in range(4)]
    batch = Fetcher(held, collate)[NONE]
    assert (batch["x"].shape, batch["labels"].shape) == ((0, 3), (0,))
    assert "y" in held[0]


def test_empty_batch_keeps_nothing_of_the_record_it_was_made_from() -> None:
    class Carrying(UserDict):  # type: ignore[type-arg]
        """A mapping that holds more than its items."""

        def __init__(self, data: Any, source: str = "") -> None:
            super().__init__(data)
            self.source = source

    fetcher = Fetcher(
        Records(lambda i: torch.full((4,), 1.25)),
        collate_fn=lambda records: Carrying({"x": torch.stack(records)}, source="the record"),
    )
    batch = fetcher[NONE]
    assert type(batch) is Carrying and batch.source == ""
    assert batch["x"].untyped_storage().nbytes() == 0
    assert fetcher._empty["x"].untyped_storage().nbytes() == 0


def test_marking_an_empty_batch_leaves_the_next_one_clean() -> None:
    fetcher = Fetcher(Records(lambda i: torch.zeros(2)))
    fetcher[NONE].requires_grad_()
    assert not fetcher[NONE].requires_grad


UNCLEAR = [
    lambda records: torch.stack(records).sum(),  # no dimension counts the records
    lambda records: torch.stack(records) @ torch.stack(records).T,  # two do
    lambda records: (torch.stack(records), len(records)),
    lambda records: {str(len(records)): torch.stack(records)},
    lambda records: torch.stack(records) if len(records) > 1 else records,
]


@pytest.mark.parametrize("collate", UNCLEAR)
def test_a_batch_without_a_dimension_of_rows_needs_a_collate_fn_for_no_records(collate: Any) -> None:
    dataset = Records(lambda i: torch.full((3,), 7.25))
    with pytest.raises(ConfigurationError, match=r"collate_fn .* accepts \[\]") as refusal:
        Fetcher(dataset, collate_fn=lambda records: collate(records) if records else 1 / 0)[NONE]
    assert "7.25" not in str(refusal.value) and refusal.value.__context__ is None
    made = Fetcher(dataset, collate_fn=lambda records: collate(records) if records else "made for nothing")
    assert made[NONE] == "made for nothing"


# -- pieces


@given(st.lists(st.integers(0, 10**9)), st.integers(1, 50))
def test_pieces_are_the_batch(values: list[int], most: int) -> None:
    indices = np.array(values, dtype=np.int64)
    cut = BySize(most)(indices)
    assert np.array_equal(np.concatenate(cut), indices)
    sizes = [len(p) for p in cut]
    assert len(cut) == max(1, -(-len(values) // most))
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1


def test_pieces_without_a_limit() -> None:
    assert [p.tolist() for p in BySize(None)(SOME)] == [[1, 4, 5]]
