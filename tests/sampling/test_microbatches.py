"""Cuts of a draw: the microbatch of a record does not depend on the draw."""

from __future__ import annotations

from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from clipwise import Batch, make_private
from clipwise.errors import ConfigurationError
from clipwise.sampling.fetch import Fetcher
from clipwise.sampling.loader import PrivateLoader
from clipwise.sampling.microbatches import ByBlock, ByIndex, ByUser, microbatches_of
from clipwise.sampling.schemes import FixedSize, Full, Partition, Poisson, Shuffled

subsets = st.lists(st.integers(0, 200), unique=True).map(lambda x: np.array(sorted(x), dtype=np.int64))


@given(subsets, st.integers(1, 12))
def test_by_index_there_are_always_k_and_a_record_stays_in_its_own(drawn: np.ndarray, k: int) -> None:
    cut = ByIndex(k)(drawn)
    assert len(cut) == k
    for j, piece in enumerate(cut):
        assert piece.tolist() == [i for i in drawn.tolist() if i % k == j]


@given(subsets, st.integers(1, 12), st.data())
def test_one_record_more_changes_one_microbatch(drawn: np.ndarray, k: int, data: st.DataObject) -> None:
    new = data.draw(st.integers(0, 200).filter(lambda i: i not in drawn))
    before, after = ByIndex(k)(drawn), ByIndex(k)(np.sort(np.append(drawn, new)))
    assert [j for j in range(k) if before[j].tolist() != after[j].tolist()] == [new % k]


def test_the_blocks_of_a_partition_are_its_microbatches() -> None:
    scheme = Partition(11, 6, microbatches=3)  # blocks of 2, the last of 1
    for number in range(40):
        cut = microbatches_of(scheme, 3)(scheme.draw(bytes([number]), b"", 0))
        assert len(cut) == 3
        assert all(p.tolist() in [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]] for p in cut)


def test_which_cut_a_scheme_has() -> None:
    assert microbatches_of(Partition(12, 4, microbatches=2), 2) == ByBlock(2)
    assert microbatches_of(FixedSize(12, 4, microbatches=2), 2) == ByIndex(2, may_be_empty=False)
    assert microbatches_of(Full(12), 1) == ByIndex(1, may_be_empty=False)
    for scheme in (Poisson(12, 0.5), Shuffled(12, 4), Full(12)):
        assert microbatches_of(scheme, 3) == ByIndex(3, may_be_empty=True)


IDS: list[Any] = [
    [3, 1, 3, 2, 1, 3],
    ["c", "a", "c", "b", "a", "c"],
    torch.tensor([3, 1, 3, 2, 1, 3]),
    np.array([3, 1, 3, 2, 1, 3]),
    [(3, "x"), (1, "x"), (3, "x"), (2, "x"), (1, "x"), (3, "x")],
]
OWNER = {i: f"user {i % 3}" for i in range(6)}


@pytest.mark.parametrize("ids", IDS, ids=lambda ids: type(ids).__name__)
def test_a_users_records_are_one_microbatch(ids: Any) -> None:
    users = ByUser(ids)
    assert users.users == users.units(6) == 3
    assert [p.tolist() for p in users(np.array([0, 2]))] == [[1, 4], [0, 2, 5]]
    assert [p.tolist() for p in users(np.array([], dtype=np.int64))] == [[]]


def test_a_generator_is_read_in_its_order() -> None:
    users = ByUser(owner for owner in IDS[0])
    assert [p.tolist() for p in users(np.arange(3))] == [[1, 4], [3], [0, 2, 5]]


def test_users_are_numbered_by_id_and_not_by_place() -> None:
    """Were it by place, more records of one user would change the number, and the block, of others."""
    before, after = ByUser([5, 7, 9]), ByUser([9, 5, 7, 9])
    assert [p.tolist() for p in before(np.arange(3))] == [[0], [1], [2]]
    assert [p.tolist() for p in after(np.arange(3))] == [[1], [2], [0, 3]]


def test_what_a_user_has_is_not_shown() -> None:
    assert repr(ByUser([1, 1, 1, 2])) == "ByUser(2 users)"


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "empty"),
        ("abc", "is a str"),
        (7, "is a int"),
        (torch.zeros(3, 2), "2 dimensions"),
        ([1, None, 2], "missing"),
        ([1.0, float("nan")], "missing"),
        ([[1], [2]], "plain value"),
        ([torch.tensor(1), torch.tensor(1)], "plain value"),
        (np.array(OWNER), "0 dimensions"),
    ],
    ids=repr,
)
def test_ids_that_identify_no_user_are_refused(ids: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match="group.*" + words):
        ByUser(ids)


BY_KEY = [OWNER, OrderedDict(OWNER), MappingProxyType(OWNER), OWNER.keys(), OWNER.items(), OWNER.values()]


@pytest.mark.parametrize("ids", BY_KEY, ids=lambda ids: type(ids).__name__)
def test_a_mapping_is_no_column(ids: Any) -> None:
    """It would be read as its keys: as many users as records, and no protection of a user."""
    with pytest.raises(ConfigurationError) as refusal:
        ByUser(ids)
    said = str(refusal.value)
    assert said.startswith(f"group is a {type(ids).__name__}:") and "[owner[i] for i in range(n)]" in said


@pytest.mark.parametrize("ids", [set(range(6)), frozenset(range(6))], ids=lambda ids: type(ids).__name__)
def test_a_set_is_no_column(ids: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"group is a (frozen)?set.*not in the order.*id for each record"):
        ByUser(ids)


def test_a_table_is_no_column() -> None:
    """A table iterates over its column names, which may be as many as its records."""

    class Table(list[str]):
        ndim = 2

    with pytest.raises(ConfigurationError, match="group has 2 dimensions"):
        ByUser(Table(["age", "height"]))


def test_make_private_refuses_owners_by_key() -> None:
    model = nn.Linear(2, 1)

    def make(group: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(6, 2))
        make_private(model, optimizer, data, clipping=Batch(), group=group, batch_size=2, noise_multiplier=1.0)

    make([OWNER[i] for i in range(6)])
    for group in (OWNER, set(OWNER)):
        with pytest.raises(ConfigurationError, match="group is a"):
            make(group)


def test_ids_must_be_as_many_as_records() -> None:
    with pytest.raises(ConfigurationError, match="one user id for each record"):
        ByUser([1, 2, 3]).units(4)


def test_the_loader_yields_microbatches_one_by_one() -> None:
    data = TensorDataset(torch.arange(10))
    secrets = lambda: iter([(b"a", b"e", 0)])  # noqa: E731
    loader = PrivateLoader(Full(10), Fetcher(data), secrets, cut=ByIndex(3))
    seen = []
    for (x,) in loader.pieces():
        piece = loader.awaited()
        piece.consumed = True
        assert piece.index_in_batch == len(seen) and piece.last == (len(seen) == 2) and piece.size == len(x)
        seen.append(x.tolist())
    assert seen == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]


def test_the_loader_draws_users() -> None:
    data = TensorDataset(torch.arange(6))
    users = ByUser(IDS[0])
    secrets = lambda: iter([(b"a", b"e", 0)])  # noqa: E731
    loader = PrivateLoader(Full(3), Fetcher(data), secrets, cut=users, num_workers=0)
    seen = []
    for (x,) in loader.pieces():
        loader.awaited().consumed = True
        seen.append(x.tolist())
    assert seen == [[1, 4], [3], [0, 2, 5]]
    with pytest.raises(ConfigurationError, match="dataset_size"):
        PrivateLoader(Full(6), Fetcher(data), secrets, cut=users)


def test_what_cannot_be_empty_is_refused_where_a_microbatch_may_be() -> None:
    class Odd:
        def __len__(self) -> int:
            return 12

        def __getitem__(self, i: int) -> object:
            return object()

    fetcher = Fetcher(Odd(), collate_fn=lambda records: object() if records else 1 / 0)
    for scheme, cut in ((Full(12), ByIndex(3)), (Shuffled(12, 4), ByIndex(3))):
        with pytest.raises(ConfigurationError, match="empty batch"):
            PrivateLoader(scheme, fetcher, lambda: iter(()), cut=cut)
    PrivateLoader(FixedSize(12, 4), fetcher, lambda: iter(()), cut=ByIndex(2, may_be_empty=False))
