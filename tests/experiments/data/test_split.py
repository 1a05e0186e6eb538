import pytest
import torch
from torch.utils.data import TensorDataset

from experiments.data import split


@pytest.mark.parametrize("size", [1, 9, 10, 11, 60])
@pytest.mark.parametrize("validation", [True, False])
def test_every_record_is_in_one_part(size, validation):
    parts = split(TensorDataset(torch.arange(size)), validation=validation)
    found = torch.cat([part.tensors[0] for part in parts])
    assert sorted(found.tolist()) == list(range(size))
    assert validation or len(parts.validation) == 0


def test_a_tenth_is_public():
    parts = split(TensorDataset(torch.arange(600)), validation=True)
    assert [len(part) for part in parts] == [480, 60, 60]
    assert len(split(TensorDataset(torch.arange(60_000))).private) == 54_000


def test_it_looks_at_positions_alone():
    one, other = torch.arange(50), torch.randint(0, 1000, (50,))
    for a, b in zip(split(TensorDataset(one)), split(TensorDataset(other)), strict=True):
        assert torch.equal(other[a.tensors[0]], b.tensors[0])


def test_it_is_the_same_for_ever_and_follows_no_pattern():
    public = split(TensorDataset(torch.arange(600))).public.tensors[0]
    assert public[:5].tolist() == [7, 12, 31, 33, 43]
    assert len(set((public % 10).tolist())) == 10
