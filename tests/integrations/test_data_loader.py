"""The settings of a DataLoader that every adapter for training loops refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from clipwise.errors import ConfigurationError
from clipwise.integrations.data_loader import arguments_of, holds_records_of
from tests.runs import data


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.zeros(3, 1))


class ByLength(BatchSampler):
    """Groups records of similar length."""


class PaddingFree:
    padding_free = True

    def __call__(self, rows: Any) -> Any:
        return rows


class DataCollatorWithFlattening:
    """The name of a collator of transformers."""

    def __call__(self, rows: Any) -> Any:
        return rows


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: [data()], "DataLoader, not list"),
        (lambda: DataLoader(Stream(), 8), "IterableDataset"),
        (lambda: DataLoader(data(), batch_sampler=ByLength(SequentialSampler(data()), 8, False)), "batch_sampler"),
        (lambda: DataLoader(data(), batch_size=None), "batch_sampler"),
        (lambda: DataLoader(data(), 8, sampler=SubsetRandomSampler([1, 2])), "sampler SubsetRandomSampler"),
        (lambda: DataLoader(data(), 8, sampler=WeightedRandomSampler([1.0] * 40, 40)), "sampler WeightedRandomSampler"),
        (lambda: DataLoader(data(), 8, sampler=RandomSampler(data(), replacement=True)), "sampler RandomSampler"),
        (lambda: DataLoader(data(), 8, drop_last=True), "drop_last"),
        (lambda: DataLoader(data(), 8, worker_init_fn=print), "worker_init_fn"),
        (lambda: DataLoader(data(), 8, collate_fn=PaddingFree()), r"PaddingFree joins \(packs\)"),
        (lambda: DataLoader(data(), 8, collate_fn=DataCollatorWithFlattening()), r"Flattening joins \(packs\)"),
    ],
    ids=[
        "list", "stream", "grouped by length", "no batches", "subset", "weighted", "replacement", "drop_last",
        "workers", "padding-free", "packed",
    ],
)  # fmt: skip
def test_a_setting_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        arguments_of(make())


def test_the_arguments_of_a_loader() -> None:
    dataset = data()
    found = arguments_of(DataLoader(dataset, 64, shuffle=True, collate_fn=list))
    assert found == {
        "dataset": dataset, "batch_size": len(dataset), "num_workers": 0, "pin_memory": False, "collate_fn": list,
    }  # fmt: skip


def test_an_evaluation_on_training_records_is_found() -> None:
    rows, other = data(), data()
    half, rest = Subset(rows, range(20)), Subset(rows, range(20, 40))
    assert holds_records_of(rows, half) and holds_records_of(half, rows) and holds_records_of(rows, Subset(half, [1]))
    assert not holds_records_of(half, rest) and not holds_records_of(rows, other) and not holds_records_of(None, None)
