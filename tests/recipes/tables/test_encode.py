from __future__ import annotations

from datetime import date

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipwise.recipes.tables.encode import encoded, placed, width
from clipwise.recipes.tables.schema import Auto, Category, Date, Hashed, Ignored, Kind, Mixed, Number
from clipwise.recipes.tables.values import MISSING, bucket, to_day

KINDS: list[Kind] = [
    Number((0.0, 10.0)),
    Number((0.0, 0.0, 5.0, 100.0)),
    Category(("a", "NA", "é")),
    Hashed(8, (1, 3)),
    Date(0.0, 10_000.0),
    Mixed((-1.0, 0.0, 1.0), 4),
    Ignored(),
    Auto(),
]
cells = st.one_of(st.text(max_size=4), st.floats().map(str), st.dates().map(str), st.sampled_from(["a", "é", *MISSING]))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@settings(max_examples=40, deadline=None)
@given(st.lists(cells, min_size=1, max_size=5))
def test_every_cell_is_encoded_alone_and_bounded(kind: Kind, values: list[str]) -> None:
    found = encoded(kind, values, MISSING, ".")
    assert found.shape == (len(values), width(kind)) and np.isfinite(found).all() and (np.abs(found) <= 1).all()
    assert np.array_equal(found, np.concatenate([encoded(kind, [value], MISSING, ".") for value in values]))


def test_numbers_between_their_points() -> None:
    found = encoded(Number((0.0, 10.0)), ["0", "2.5", "1e400", "-7", "", "x"], MISSING, ".")
    assert found.tolist() == [[-1, 0], [-0.5, 0], [1, 0], [-1, 0], [0, 1], [0, 1]]
    # Quantiles: 0 has the share of three points.
    assert placed(np.array([0.0, 50.0, 100.0]), (0, 0, 0, 100, 100)).tolist() == [-0.5, pytest.approx(0.125), 0.75]
    assert placed(np.array([3.0, 9.0]), (5, 5, 5)).tolist() == [0.0, 0.0]  # a constant says nothing


def test_categories_buckets_and_missing_values() -> None:
    found = encoded(Category(("a", "NA")), ["a", " NA", "b", "?"], MISSING, ".")
    assert found.tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    kept = Hashed(8, (bucket("x", 8),))
    other = next(text for text in "abcdefgh" if bucket(text, 8) != bucket("x", 8))
    assert encoded(kept, ["x", other, ""], MISSING, ".").tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    mixed = encoded(Mixed((-1.0, 0.0, 1.0), 4), ["1", "x", "null"], MISSING, ".")
    assert mixed[0].tolist() == [1, 0, 0, 0, 0, 0] and mixed[1, 1 + bucket("x", 4)] == 1 and mixed[2, -1] == 1


def test_dates_have_a_place_a_season_and_a_weekday() -> None:
    monday, next_monday, autumn = encoded(
        Date(to_day(date(2020, 1, 1)), to_day(date(2022, 1, 1))),
        ["2021-01-04", "2021-01-11", "2021-09-06"],
        MISSING,
        ".",
    )
    assert np.allclose(monday[3:5], next_monday[3:5], atol=1e-5) and np.allclose(monday[3:5], autumn[3:5], atol=1e-5)
    assert monday[0] < next_monday[0] < autumn[0] and not np.allclose(monday[1:3], autumn[1:3], atol=0.5)
