"""Private data that is given as public is refused if objects or memory show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    random_split,
)

from clipwise import Batch, PerExample, layers, make_private
from clipwise.clipping.base import Strategy
from clipwise.contrib import Adaptive, ByNorm, Multipliers, PublicData
from clipwise.errors import ConfigurationError
from clipwise.layers.public_statistics import AllPublicStatistics
from clipwise.validation.public_overlap import require_apart

X, Y = torch.randn(30, 4), torch.arange(30) % 3
ALL = TensorDataset(X, Y)
BY_COLUMN = torch.randn(4, 30).t()  # the elements of a row are far from each other
TABLE = torch.randn(30, 5)
WINDOWS = torch.randn(33).unfold(0, 4, 1)  # of a series: each shares values with the next
REPEATED = torch.ones(1, 4).expand(30, 4)


class Loading(Dataset[Any]):
    """Loads each record on access."""

    def __init__(self) -> None:
        self.loaded = 0

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.loaded += 1
        return torch.ones(4), 0


LOADING = Loading()


def rows(inputs: Tensor, begin: int, end: int) -> TensorDataset:
    return TensorDataset(inputs[begin:end], Y[begin:end])


def others() -> TensorDataset:
    return TensorDataset(torch.randn(30, 4), Y)


def half(dataset: Dataset[Any], which: int) -> Subset[Any]:
    return random_split(dataset, [20, 10], torch.Generator().manual_seed(0))[which]


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


SHARED: dict[str, tuple[Any, Any]] = {
    "the data set itself": (ALL, ALL),
    "all of its tensors": (ALL, TensorDataset(X, Y)),
    "some rows of its tensors": (ALL, TensorDataset(X[20:], Y[20:])),
    "a part of it": (ALL, Subset(ALL, range(20, 30))),
    "two parts with a record in common": (Subset(ALL, range(21)), Subset(ALL, range(20, 30))),
    "a part of a part": (Subset(Subset(ALL, range(10, 30)), range(10)), Subset(ALL, [19, 29])),
    "a loader of it": (ALL, DataLoader(ALL, 5)),
}
FOUND: dict[str, tuple[Any, Any]] = {
    "all of a random half": (half(ALL, 0), TensorDataset(X, Y)),
    "all of every second row": (TensorDataset(X[::2], Y[::2]), ALL),
    "every third of every second row": (TensorDataset(X[::2], Y[::2]), TensorDataset(X[::3], Y[::3])),
    "the only part of a whole": (ConcatDataset([ALL]), ALL),
    "a whole with a record twice": (ConcatDataset([ALL, rows(X, 2, 3)]), rows(X, 20, 30)),
    "the second part of a whole": (ConcatDataset([others(), ALL]), rows(X, 0, 2)),
    "the last of a whole": (Subset(ConcatDataset([others(), ALL]), range(10, 60, 7)), rows(X, 29, 30)),
    "from the end": (Subset(ALL, range(20, 30)), Subset(ALL, [-1])),
    "rows that lie by column": (rows(BY_COLUMN, 0, 30), rows(BY_COLUMN, 0, 5)),
    "rows of another shape": (ALL, TensorDataset(X.view(30, 2, 2), Y)),
    "windows of a series": (rows(WINDOWS, 0, 30), rows(WINDOWS, 0, 5)),
    "a row that is repeated": (TensorDataset(REPEATED, Y), TensorDataset(REPEATED, Y)),
    "what is loaded": (ConcatDataset([LOADING]), Subset(LOADING, [3])),
}
APART: dict[str, tuple[Any, Any]] = {
    "other tensors": (ALL, TensorDataset(torch.randn(10, 4), Y[:10])),
    "other rows": (TensorDataset(X[:20], Y[:20]), TensorDataset(X[20:], Y[20:])),
    "every second row": (TensorDataset(X[::2], Y[::2]), TensorDataset(X[1::2], Y[1::2])),
    "other parts": (Subset(ALL, range(20)), Subset(ALL, range(20, 30))),
    "parts of parts": (Subset(Subset(ALL, range(10, 30)), range(10)), Subset(ALL, range(20, 30))),
    "random halves": (half(ALL, 0), half(TensorDataset(X, Y), 1)),
    "parts of wholes": (ConcatDataset([rows(X, 0, 9), rows(X, 20, 30)]), ConcatDataset([rows(X, 9, 20)])),
    "some of a whole": (Subset(ConcatDataset([others(), ALL]), [*range(31), 59]), rows(X, 1, 29)),
    "halves of a whole": (half(ConcatDataset([ALL]), 0), half(ALL, 1)),
    "a loader of other rows": (rows(X, 0, 20), DataLoader(rows(X, 20, 30), 5)),
    "a loader of another part": (Subset(ALL, range(20)), DataLoader(Subset(ALL, range(20, 30)), 5)),
    "a loader of others": (Subset(ALL, range(20)), DataLoader(ALL, 5, sampler=SubsetRandomSampler(range(20, 30)))),
    "from the end": (Subset(ALL, range(20)), Subset(ALL, [-1, -10])),
    "rows that lie by column": (rows(BY_COLUMN, 0, 20), rows(BY_COLUMN, 20, 30)),
    "columns of a table": (TensorDataset(TABLE[:20, :4], Y[:20]), TensorDataset(TABLE[20:, 1:], Y[20:])),
    "windows of a series": (rows(WINDOWS, 0, 20), rows(WINDOWS, 20, 30)),
    "parts of windows": (Subset(rows(WINDOWS, 0, 30), range(20)), Subset(rows(WINDOWS, 0, 30), range(20, 30))),
    "parts of a repeated row": (rows(REPEATED, 0, 20), rows(REPEATED, 20, 30)),
    "the same labels": (ALL, TensorDataset(torch.randn(30, 4), Y)),
    "what is loaded": (Subset(LOADING, range(20)), ConcatDataset([Subset(LOADING, range(20, 30))])),
}


@pytest.mark.parametrize("case", SHARED)
@pytest.mark.parametrize("policy", [Adaptive, Multipliers, ByNorm])
@pytest.mark.parametrize("strategy", [PerExample, Batch])
def test_private_records_are_refused_as_public_data(case: str, policy: Any, strategy: Any) -> None:
    dataset, public = SHARED[case]
    with pytest.raises(ConfigurationError, match=r"PublicData\(mine\).*private data set.*Hold these records out"):
        make(dataset, strategy(parts=policy(PublicData(public, loss, name="mine"))))


@pytest.mark.parametrize("case", FOUND)
def test_shared_records_are_found_by_objects_and_memory(case: str) -> None:
    dataset, public = FOUND[case]
    with pytest.raises(ConfigurationError, match="private data set"):
        make(dataset, PerExample(parts=Adaptive(PublicData(public, loss))))


@pytest.mark.parametrize("case", APART)
def test_held_out_records_are_accepted(case: str) -> None:
    dataset, public = APART[case]
    make(dataset, PerExample(parts=Adaptive(PublicData(public, loss))))


def test_private_rows_are_refused_as_public_rows() -> None:
    make(TensorDataset(X[:20], Y[:20]), rows=X[20:])
    with pytest.raises(ConfigurationError, match=r"rows of normalization layers.*private data set"):
        make(ALL, rows=X[20:])


PRIVATE_FORMS: list[Callable[[slice], Any]] = [
    lambda s: TensorDataset(X[s], Y[s]),
    lambda s: Subset(ALL, range(30)[s]),
    lambda s: ConcatDataset([others(), TensorDataset(X[s], Y[s])]),
    lambda s: Subset(ConcatDataset([others(), rows(X, 0, 17), rows(X, 17, 30)]), range(30, 60)[s]),
]
PUBLIC_FORMS: list[Callable[[slice], Any]] = [
    *PRIVATE_FORMS,
    lambda s: DataLoader(TensorDataset(X[s], Y[s]), 5, shuffle=True),
]
slices = st.builds(slice, st.integers(0, 29), st.integers(1, 30), st.integers(1, 5)).filter(
    lambda s: bool(range(30)[s])
)


@given(slices, st.sampled_from(PRIVATE_FORMS), slices, st.sampled_from(PUBLIC_FORMS))
def test_shared_rows_are_found_in_every_form(
    private: slice, as_private: Callable[[slice], Any], public: slice, as_public: Callable[[slice], Any]
) -> None:
    dataset, statistics = as_private(private), AllPublicStatistics(nn.Linear(4, 3))
    strategy = PerExample(parts=Adaptive(PublicData(as_public(public), loss)))
    if set(range(30)[private]).isdisjoint(range(30)[public]):
        require_apart(dataset, strategy, statistics)
    else:
        with pytest.raises(ConfigurationError, match="private data set"):
            require_apart(dataset, strategy, statistics)


def test_no_record_is_loaded() -> None:
    private, public = Loading(), Loading()
    strategy = PerExample(parts=Adaptive(PublicData(ConcatDataset([public]), loss)))
    sets: list[Any] = [private, Subset(private, range(20)), ConcatDataset([private]), DataLoader(private)]
    for dataset in sets:
        require_apart(dataset, strategy, AllPublicStatistics(nn.Linear(4, 3)))
    assert private.loaded == public.loaded == 0


@pytest.mark.parametrize("of", [torch.Tensor.to_sparse, lambda t: t.to("meta")], ids=["sparse", "meta"])
def test_data_without_addresses_is_compared_by_object(of: Callable[[Tensor], Tensor]) -> None:
    inputs, statistics = of(X), AllPublicStatistics(nn.Linear(4, 3))
    strategy = PerExample(parts=Adaptive(PublicData(TensorDataset(inputs, Y), loss)))
    require_apart(TensorDataset(of(X), Y), strategy, statistics)
    with pytest.raises(ConfigurationError, match="private data set"):
        require_apart(TensorDataset(inputs, Y), strategy, statistics)
