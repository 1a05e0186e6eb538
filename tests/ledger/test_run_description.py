"""Run descriptions survive JSON, and descriptions of other versions can be read."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipwise.ledger.run_description import About, plain, versions
from clipwise.privacy import Part

FULL = About(
    strategy={"max_norm": 1.0, "norms": [1.0, 2.0]},
    parts=(Part("all", ("w",), 1.0, 1.5), Part("count", (), 0.5, 3.0)),
    divisor=8.0,
    arithmetic="ieee",
    delta=1e-5,
    budget=3.0,
    seeded=True,
    probed=False,
    versions=versions(),
)


@pytest.mark.parametrize("about", [FULL, About()])
def test_it_survives_json(about: About) -> None:
    assert About.from_dict(json.loads(json.dumps(about.to_dict(), allow_nan=False))) == about


def test_what_another_version_wrote_is_left_aside() -> None:
    assert About.from_dict({"novel": 1, "delta": 1e-6}) == About(delta=1e-6)


@pytest.mark.slow
@given(st.recursive(st.floats() | st.text() | st.none(), lambda inner: st.lists(inner) | st.tuples(inner)))
def test_plain_data_is_always_json(value: object) -> None:
    json.dumps(plain(value), allow_nan=False)


def test_infinity_is_none() -> None:
    assert plain({"a": math.inf, "b": (math.nan, 1.5)}) == {"a": None, "b": [None, 1.5]}
