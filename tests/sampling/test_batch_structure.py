"""Tensors in the batches of a loader."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from clipwise.sampling.batch_structure import arguments_of, map_tensors, take_rows, tensors_in, with_zeros

Pair = namedtuple("Pair", ["first", "second"])

leaves = st.integers(0, 9).map(torch.tensor) | st.sampled_from([None, "word", 3, 2.5])
structures = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.tuples(inner, inner).map(lambda two: Pair(*two))
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=12,
)


def plain(value: Any) -> Any:
    """The structure with numbers in the place of tensors, to be compared."""
    if isinstance(value, Tensor):
        return "tensor", value.tolist()
    if isinstance(value, dict):
        return type(value), [(k, plain(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [plain(v) for v in value]
    return value


@given(value=structures)
def test_changing_nothing_gives_the_same_structure_and_the_same_tensors(value: Any) -> None:
    found = map_tensors(lambda t: t, value)
    assert plain(found) == plain(value)
    assert all(a is b for a, b in zip(tensors_in(found), tensors_in(value), strict=True))


@given(value=structures)
def test_every_tensor_is_changed_once_in_order(value: Any) -> None:
    seen: list[Tensor] = []

    def add_ten(t: Tensor) -> Tensor:
        seen.append(t)
        return t + 10

    found = list(tensors_in(map_tensors(add_ten, value)))
    assert all(a is b for a, b in zip(seen, tensors_in(value), strict=True))
    assert [t.item() for t in found] == [t.item() + 10 for t in seen]


def double(value: Any) -> Any:
    return map_tensors(lambda t: 2 * t, value)


def test_a_bare_tensor_and_what_is_none() -> None:
    assert double(torch.tensor(3)).item() == 6
    for value in (None, "word", 7, object):
        assert double(value) is value
        assert list(tensors_in(value)) == []


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict])
def test_mappings_keep_their_type_and_keys(kind: Any) -> None:
    found = double(kind({"x": torch.tensor(1), "name": "a"}))
    assert type(found) is kind and list(found) == ["x", "name"]
    assert found["x"].item() == 2 and found["name"] == "a"


def test_named_tuples_keep_their_names() -> None:
    found = double(Pair(torch.tensor(1), [torch.tensor(2)]))
    assert isinstance(found, Pair)
    assert found.first.item() == 2 and found.second[0].item() == 4


def test_the_original_stays_what_it_was() -> None:
    inner = torch.tensor(1)
    value = {"a": [inner]}
    double(value)
    assert value["a"][0] is inner and inner.item() == 1


def test_a_mapping_that_cannot_be_built_from_its_items_becomes_a_dict() -> None:
    found = double(defaultdict(list, {"x": torch.tensor(1)}))
    assert type(found) is dict and found["x"].item() == 2


def test_lists_and_tuples_are_several_arguments_and_all_else_is_one() -> None:
    x, y = torch.zeros(2), torch.ones(2)
    assert arguments_of((x, y)) == arguments_of([x, y]) == arguments_of(Pair(x, y)) == (x, y)
    mapping = UserDict({"x": x})
    assert arguments_of(mapping) == (mapping,) and arguments_of(x) == (x,)


def test_rows_are_taken_of_all_that_has_them() -> None:
    batch = {
        "x": torch.arange(6.0).view(3, 2).requires_grad_(),
        "sides": (torch.arange(3), ["a", "b", "c"]),
        "rate": torch.tensor(0.5),
        "classes": torch.arange(4),
        "none": None,
    }
    found = take_rows(batch, [2, 0, 2], 3)
    assert found["x"].tolist() == [[4, 5], [0, 1], [4, 5]] and not found["x"].requires_grad
    assert found["sides"][0].tolist() == [2, 0, 2] and found["sides"][1] == ["c", "a", "c"]
    assert found["rate"] == 0.5 and found["classes"].tolist() == [0, 1, 2, 3] and found["none"] is None
    found["classes"].zero_()
    assert batch["classes"].tolist() == [0, 1, 2, 3]  # type: ignore[union-attr]


def test_columns_are_no_rows() -> None:
    x, y = torch.arange(2), torch.arange(2) + 2
    assert [t.tolist() for t in take_rows((x, y), [1], 2)] == [[1], [3]]


def test_zeros_for_some_rows() -> None:
    batch = torch.ones(3, 2), torch.ones(3, dtype=torch.long), torch.ones(4)
    everything = with_zeros(batch, slice(1, 2), 3)
    assert everything[0].tolist() == [[1, 1], [0, 0], [1, 1]] and everything[1].tolist() == [1, 0, 1]
    floats = with_zeros(batch, slice(1, 2), 3, only_floats=True)
    assert floats[0].tolist() == [[1, 1], [0, 0], [1, 1]] and floats[1].tolist() == [1, 1, 1]
    assert floats[2].tolist() == [1] * 4 and batch[0].tolist() == [[1, 1]] * 3
