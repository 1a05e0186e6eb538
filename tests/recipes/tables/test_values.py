from __future__ import annotations

import math
from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipwise.recipes.tables.values import MISSING, bucket, days, is_missing, numbers, to_date, to_day


def test_missing_values_are_words_without_case() -> None:
    cells = ["", "  ", "NA", "n/a", "NaN", "?", "NULL", "0", "none", "no"]
    assert is_missing(cells).tolist() == [True] * 7 + [False] * 3
    assert is_missing(["-1", "NA"], ["-1"]).tolist() == [True, False]


@pytest.mark.parametrize(
    ("cell", "value"),
    [("1", 1), (" -2.5e3 ", -2500), ("1e400", math.inf), ("9" * 400, math.inf), ("٣", 3), ("+.5", 0.5)],
)
def test_numbers(cell: str, value: float) -> None:
    assert numbers([cell]).tolist() == [value]


@pytest.mark.parametrize("cell", ["", "x", "1_000", "1,5", "0x10", "1 2", "nan"])
def test_other_cells_are_no_numbers(cell: str) -> None:
    assert math.isnan(numbers([cell])[0])


def test_a_decimal_comma_is_read_where_the_file_has_semicolons() -> None:
    assert numbers(["3,14", "2.5", "7"], ",").tolist() == [3.14, 2.5, 7]
    assert math.isnan(numbers(["1.234,5"], ",")[0])


@pytest.mark.parametrize(
    ("cell", "day"),
    [
        ("1970-01-01", 0),
        ("1970/1/2", 1),
        ("1970-01-01T12:00:00Z", 0.5),
        ("1970-01-02 06:00", 1.25),
        ("03.01.1970", 2),
        ("01/31/1970", 30),
        ("31/01/1970", 30),
        ("1969-12-31", -1),
    ],
)
def test_dates(cell: str, day: float) -> None:
    assert days([cell]).tolist() == [day]


@pytest.mark.parametrize("cell", ["", "2020", "2020-13-01", "2021-02-29", "20200101", "1/2", "2020-01-01 25"])
def test_other_cells_are_no_dates(cell: str) -> None:
    assert math.isnan(days([cell])[0])


@given(st.dates())
def test_days_and_dates_are_inverse(day: date) -> None:
    assert to_date(to_day(day)) == day and days([day.isoformat()])[0] == to_day(day)


@given(st.text(), st.integers(1, 1000))
def test_buckets_are_public_and_in_range(text: str, buckets: int) -> None:
    assert 0 <= bucket(text, buckets) < buckets
    assert bucket(text, buckets) == bucket(f" {text} ", buckets)


def test_buckets_are_the_same_everywhere() -> None:
    assert [bucket(text, 256) for text in ("Private", "Self-emp-inc", "大阪")] == [231, 91, 28]
    assert "" in MISSING
