"""Spaces: every point lies in its range."""

import json
import math
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipwise.errors import ConfigurationError
from clipwise.tune import Choice, Range, point
from clipwise.tune.subject import described

UNIT = st.floats(0, 1)


@given(UNIT, st.booleans(), st.booleans())
def test_a_range_is_kept(u, log, whole):
    value = Range(1, 15, log, whole).at(u)
    assert 1 <= value <= 15
    assert not whole or isinstance(value, int)


@given(st.lists(UNIT, min_size=2, max_size=2).map(sorted), st.booleans())
def test_a_range_rises(pair, log):
    dimension = Range(0.01, 7, log)
    assert dimension.at(pair[0]) <= dimension.at(pair[1])


def test_the_middle_of_a_logarithmic_range_is_the_geometric_mean():
    assert Range(1e-4, 1e-2, log=True).at(0.5) == pytest.approx(1e-3)
    assert Range(2, 6).at(0.5) == 4


@given(UNIT)
def test_a_choice_is_one_of_its_values(u):
    assert Choice(("a", "b", "c")).at(u) in ("a", "b", "c")


def test_every_value_can_be_chosen():
    assert {Choice((5, 10, 20)).at(i / 99) for i in range(100)} == {5, 10, 20}


def test_a_point_has_a_value_for_every_name():
    found = point({"rate": Range(0, 1), "size": Choice((3,))}, [0.25, 0.9])
    assert found == {"rate": 0.25, "size": 3}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Range(2, 2),
        lambda: Range(0, 1, log=True),
        lambda: Range(0, math.inf),
        lambda: Range(0.2, 0.4, whole=True),
        lambda: Choice(()),
    ],
)
def test_empty_spaces_are_refused(make):
    with pytest.raises(ConfigurationError):
        make()


def test_a_description_is_in_plain_types_and_distinguishes_spaces():
    space = {"rate": Range(1, 2, log=True), "kind": Choice(("a", 3, None, (1, 2)))}
    found = described(space)
    assert json.loads(json.dumps(found)) == found
    assert found == described({"rate": Range(1.0, 2.0, log=True), "kind": Choice(("a", 3, None, (1, 2)))})
    for other in (Range(1, 3, log=True), Range(1, 2), Range(1, 2, log=True, whole=True), Choice((1, 2))):
        assert described(space | {"rate": other}) != found
    assert described(space | {"kind": Choice(("a", 3, None, (1, 3)))}) != found


@pytest.mark.slow
def test_a_description_is_the_same_in_another_process():
    """Functions have other addresses there."""
    code = (
        "from clipwise.tune.subject import Choice, described\n"
        "def identity(x): return x\n"
        "print(described({'x': Choice((identity,))}), id(identity))"
    )
    texts = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert "identity" in texts[0] and texts[0].rpartition(" ")[0] == texts[1].rpartition(" ")[0]
