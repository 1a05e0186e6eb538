"""Public data: what may be marked so, how it is read, and that nothing else is taken for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from clipwise.clipping.contrib.policies import Adaptive, ByNorm, Multipliers
from clipwise.clipping.public import PublicData, require_public
from clipwise.errors import ConfigurationError
from tests.clipping.policies import loss, public, rows

BATCHES = [[rows(3, seed=1)], [rows(2, seed=2)]]


def test_a_data_set_comes_in_order_and_whole() -> None:
    data = public(count=10, batch_size=4)
    assert [len(batch[0]) for batch in data.batches()] == [4, 4, 2]
    assert torch.equal(torch.cat([batch[0] for batch in data.batches(3)]), rows(10))
    assert data.size == 10 and not data.comes_in_batches


@pytest.mark.parametrize("kind", [list, tuple, lambda b: DataLoader(b, batch_size=None)])
def test_batches_come_as_they_are(kind: Any) -> None:
    data = PublicData(kind(BATCHES), loss)
    for _ in range(2):  # again and again
        assert [len(batch[0]) for batch in data.batches(7)] == [3, 2]
    assert data.size == 2 and data.comes_in_batches


def test_records_of_any_kind_are_collated() -> None:
    class Named:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, i: int) -> dict[str, Tensor]:
            return {"x": torch.full((4,), float(i))}

    def of_mapping(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"])[:, 0]

    data = PublicData(Named(), of_mapping, batch_size=2)
    on = nn.Linear(4, 1)
    found = [data.losses(on, batch, torch.device("cpu")) for batch in data.batches()]
    assert [len(losses) for losses in found] == [2, 2, 1]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (iter(BATCHES), "cannot be read repeatedly"),
        (torch.zeros(3, 4), "cannot be read repeatedly"),
        (None, "cannot be read repeatedly"),
        ([], "empty"),
        ((rows(3), rows(3)), r"tuple of tensors.*TensorDataset\(x, y\)"),
        ([rows(3), rows(3)], r"list of tensors.*TensorDataset\(x, y\)"),
        (TensorDataset(torch.zeros(0, 4)), "empty"),
    ],
    ids=["iterator", "tensor", "nothing", "no batch", "columns", "a list of columns", "no record"],
)
def test_data_that_cannot_be_measured_on_is_refused(data: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=f"PublicData: data .*{words}"):
        PublicData(data, loss)


def test_a_loss_must_be_a_function_with_one_loss_an_example() -> None:
    with pytest.raises(ConfigurationError, match="loss must be a function"):
        PublicData(BATCHES, None)  # type: ignore[arg-type]
    for wrong in (lambda model, x: model(x).sum(), lambda model, x: model(x), lambda model, x: x[:, 0], lambda *_: 1):
        data = PublicData(BATCHES, wrong)
        with pytest.raises(ConfigurationError, match="one loss per example"):
            data.losses(nn.Linear(4, 2).double(), BATCHES[0], torch.device("cpu"))


def test_an_empty_batch_is_refused() -> None:
    model = nn.Linear(3, 2)
    public = PublicData([(torch.ones(2, 3),), (torch.ones(0, 3),)], lambda m, x: m(x).sum(1), name="known")
    full, empty = public.batches()
    assert len(public.losses(model, full, torch.device("cpu"))) == 2
    with pytest.raises(ConfigurationError, match=r"PublicData\(known\): a batch holds no example"):
        public.losses(model, empty, torch.device("cpu"))


@pytest.mark.parametrize("size", [0, -1, 2.0, True])
def test_a_batch_size_is_a_whole_number(size: Any) -> None:
    with pytest.raises(ConfigurationError, match="batch_size"):
        PublicData(BATCHES, loss, batch_size=size)


def test_it_states_its_name_and_size_and_never_what_it_holds() -> None:
    assert public().describe() == {"public": "TensorDataset", "examples": 12}
    assert PublicData(BATCHES, loss, name="old digits").describe() == {"public": "old digits", "batches": 2}
    assert "old digits" in repr(PublicData(BATCHES, loss, name="old digits"))
    assert str(float(BATCHES[0][0][0, 0]))[:6] not in repr(PublicData(BATCHES, loss))


@pytest.mark.parametrize(
    "given",
    [TensorDataset(torch.zeros(3, 4)), BATCHES, None, "mnist", {"x": 1}],
    ids=["data set", "batches", "none", "text", "mapping"],
)
def test_what_is_not_marked_as_public_is_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"Multipliers: public must be .* not a .*PublicData\(data, loss="):
        require_public(given, "Multipliers")
    for policy in (Adaptive, Multipliers, ByNorm):
        with pytest.raises(ConfigurationError, match=rf"{policy.__name__}: public must be .*ReleasedNorms\(\)"):
            policy(given)


def test_a_list_of_records_is_reported_as_batches() -> None:
    records = [(x, torch.tensor(0)) for x in rows(3)]
    given = PublicData(records, lambda model, x, y: model(x).sum())
    with pytest.raises(ConfigurationError, match="interpreted as batches: if it is a list of records, pass a data set"):
        given.losses(nn.Linear(rows(1).shape[1], 2).to(rows(1).dtype), records[0], torch.device("cpu"))
