"""What is no map-style data set is refused, and the message says what to pass instead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from clipwise.errors import ConfigurationError
from clipwise.sampling.fetch import length_of
from tests.runs import data, private_run


class Frame:
    """What a DataFrame of pandas has: rows count, and [] gives a column."""

    iloc, columns, shape = None, ["age", "y"], (40, 2)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, name: str) -> Any:
        return {"age": [1], "y": [0]}[name]


class Arrow:
    """What polars and pyarrow have."""

    columns, shape = ["age", "y"], (40, 2)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, name: str) -> Any:
        return [1]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


class OwnNames(Dataset[int]):
    """A data set with attributes named like those of a table."""

    columns, shape = ["age"], (3, 1)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index


def collated(records: list[Any]) -> Any:
    return records


@pytest.mark.parametrize(
    ("dataset", "remedy"),
    [
        (DataLoader(data(), batch_size=8), r"loader\.dataset, batch_size=8, \.\.\.\)"),
        (DataLoader(data(), batch_size=8, collate_fn=collated), r"batch_size=8, collate_fn=loader\.collate_fn"),
        (DataLoader(data(), batch_size=None), r"loader\.dataset, batch_size=\.\.\."),
        (Frame(), r"TensorDataset\(torch\.tensor\(table\[features\]"),
        (Arrow(), r"TensorDataset\(torch\.tensor\(table\[features\]"),
        (Stream(), "a list of its records"),
        ({"x": torch.zeros(40, 2), "y": torch.zeros(40)}, r"dataset\['train'\]"),
        (data().tensors, r"TensorDataset\(x, y\)"),
        ([np.zeros((40, 5)), np.zeros(40)], r"TensorDataset\(x, y\), with torch\.as_tensor"),
        ((Frame(), Frame()), r"TensorDataset\(x, y\)"),
    ],
)
def test_the_message_names_what_to_pass(dataset: Any, remedy: str) -> None:
    with pytest.raises(ConfigurationError, match=f"dataset is a .*{remedy}"):
        private_run(dataset=dataset, sample_rate=0.2)


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(torch.zeros(3, 2)),
        [torch.zeros(2), torch.zeros(2), torch.zeros(2)],  # three records of two numbers
        [(torch.zeros(9), 0), (torch.zeros(9), 1), (torch.zeros(9), 2)],
        np.zeros((3, 2)),
        torch.zeros(3, 2),
        {0: "a", 1: "b", 2: "c"},
        OwnNames(),
        "abc",
    ],
)
def test_whatever_gives_a_record_for_a_number_is_taken(dataset: Any) -> None:
    assert length_of(dataset) == 3
