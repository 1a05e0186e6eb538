"""Sentences and figures for readers: bounds are rounded up."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipwise.report import plain_words as words
from clipwise.report.record import RunRecord
from clipwise.report.wording import percent


def test_the_guarantee_names_its_unit_and_its_factor(record: RunRecord) -> None:
    text = words.guarantee(record)
    assert "any one record" in text and "replaced by an empty one" in text and "1e-5 (delta)" in text
    factor = float(text.split("factor of ")[1].split(" ")[0])
    assert math.exp(record.epsilon) <= factor < 1.02 * math.exp(record.epsilon)


@given(st.floats(1e-6, 1 - 1e-6))
def test_odds_are_not_below_the_probability(probability: float) -> None:
    first, second = (float(x) for x in words.odds(probability).split(" to "))
    assert first / second == pytest.approx(probability / (1 - probability), rel=0.02)
    assert first / second >= probability / (1 - probability) * (1 - 1e-8)


def test_odds() -> None:
    assert [words.odds(p) for p in (0.01, 0.1, 0.5, 0.75, 1.0)] == ["1 to 99", "1 to 9", "1 to 1", "3 to 1", "certain"]


def test_percentages_are_rounded_up_to_at_most_100() -> None:
    assert percent(0.123456, 3) == "12.4%" and percent(1.0) == "100%" and percent(1 - 1e-9) == "100%"


def test_figures_that_are_no_numbers() -> None:
    line = {"name": "accuracy", "value": math.nan, "low": None}
    assert words.value_of(line) == "not known" and words.interval_of(line) == "no interval"
    assert words.value_of({"name": "root mean squared error", "value": 12.34567}) == "12.35"
    assert words.value_of({"name": "root mean squared error", "value": 10934.2}) == "10,930"
    assert words.figure(math.inf) == "infinite"


def test_settings_have_no_superfluous_digits() -> None:
    values = (4.397442622418693, 1e-5, 60.0, 512, [1.0, "a"], True, 2.5e12)
    assert [words.setting(value) for value in values] == ["4.39744", "1e-5", "60", "512", "1, a", "True", "2.5e+12"]


def test_declared_preparation_is_not_covered(record: RunRecord) -> None:
    assert "declared ranges" in words.not_covered(record)[0]


def test_a_share_that_may_be_anything_has_no_value():
    line = {"name": "accuracy", "value": 0.5, "low": 0.0, "high": 1.0, "group": "rare", "rows": "held-out"}
    assert words.value_of(line) == "not known"
    assert words.value_of({**line, "low": 0.4}) == "50.0%"
