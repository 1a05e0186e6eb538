"""Private data that is given as public is refused, as far as objects and memory tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from clipwise import Adaptive, Batch, ByNorm, Multipliers, PerExample, Public, layers, make_private
from clipwise.clipping.strategy import Strategy
from clipwise.errors import ConfigurationError

X, Y = torch.randn(30, 4), torch.arange(30) % 3
ALL = TensorDataset(X, Y)


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def make(dataset: Any, clipping: Strategy | None = None, rows: Tensor | None = None) -> None:
    model: nn.Module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    if rows is None:
        layers.replace_batchnorm(model, kind="group")
    else:
        layers.replace_batchnorm(model, rows, kind="public")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make_private(model, optimizer, dataset, batch_size=5, noise_multiplier=1.0, clipping=clipping)


SHARED = {
    "the data set itself": (ALL, ALL),
    "all of its tensors": (ALL, TensorDataset(X, Y)),
    "some rows of its tensors": (ALL, TensorDataset(X[20:], Y[20:])),
    "a part of it": (ALL, Subset(ALL, range(20, 30))),
    "two parts with a record in common": (Subset(ALL, range(21)), Subset(ALL, range(20, 30))),
    "a part of a part": (Subset(Subset(ALL, range(10, 30)), range(10)), Subset(ALL, [19, 29])),
    "a loader of it": (ALL, DataLoader(ALL, 5)),
}
APART = {
    "other tensors": (ALL, TensorDataset(torch.randn(10, 4), Y[:10])),
    "other rows": (TensorDataset(X[:20], Y[:20]), TensorDataset(X[20:], Y[20:])),
    "every second row": (TensorDataset(X[::2], Y[::2]), TensorDataset(X[1::2], Y[1::2])),
    "other parts": (Subset(ALL, range(20)), Subset(ALL, range(20, 30))),
    "parts of parts": (Subset(Subset(ALL, range(10, 30)), range(10)), Subset(ALL, range(20, 30))),
    "batches": (ALL, [(torch.randn(5, 4), Y[:5])]),
}


@pytest.mark.parametrize("case", SHARED)
@pytest.mark.parametrize("policy", [Adaptive, Multipliers, ByNorm])
@pytest.mark.parametrize("strategy", [PerExample, Batch])
def test_private_records_are_no_public_data(case: str, policy: Any, strategy: Any) -> None:
    dataset, public = SHARED[case]
    with pytest.raises(ConfigurationError, match=r"Public\(mine\).*private data set.*Hold records out"):
        make(dataset, strategy(parts=policy(Public(public, loss, name="mine"))))


@pytest.mark.parametrize("case", APART)
def test_records_that_were_held_out_are(case: str) -> None:
    dataset, public = APART[case]
    make(dataset, PerExample(parts=Adaptive(Public(public, loss))))


def test_private_rows_are_no_public_rows() -> None:
    make(TensorDataset(X[:20], Y[:20]), rows=X[20:])
    with pytest.raises(ConfigurationError, match=r"rows of normalization layers.*private data set"):
        make(ALL, rows=X[20:])
