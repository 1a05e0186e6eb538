"""Tensors inside what a loader hands out."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from clipwise.structure import map_tensors, tensors_in

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
