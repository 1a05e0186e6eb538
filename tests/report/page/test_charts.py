"""Charts: scales, text alternatives, data."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipwise.report.page.charts import Axis, Line, dots, figure, interval
from tests.report.page.pages import Page


@given(st.floats(1e-9, 1e9), st.booleans())
def test_ticks_are_few_and_within_the_axis(end: float, whole: bool) -> None:
    ticks = Axis("x", end, whole).ticks()
    assert ticks[0] == 0 and ticks[-1] <= end * (1 + 1e-6) and len(ticks) <= 8
    assert len(ticks) >= 3 or whole


def test_steps_have_whole_ticks() -> None:
    assert Axis("steps", 3, whole=True).ticks() == [0, 1, 2, 3]
    assert Axis("epsilon", 0).ticks() == [0]


@pytest.mark.parametrize(("share", "filled"), [(0.0, 0), (1.0, 1), (10.44, 11), (100.0, 100), (250.0, 100)])
def test_dots_are_rounded_up(share: float, filled: int) -> None:
    page = Page(dots(share, "label"))
    assert [each["class"] for each in page.named("circle")].count("on") == filled
    assert page.named("svg")[0]["aria-label"] == "label"


def test_a_chart_has_a_text_alternative_and_its_data() -> None:
    lines = [Line("first", (0, 1), (0, 2)), Line("second", (0, 1), (2, 0), 1)]
    axes = (Axis("x", 1.0), Axis("y", 2.0))
    page = Page(figure("cost", "Cost", "It rises.", lines, axes, (("x", "y"), [(0, 0), (1, 2)])))
    drawing = next(each for each in page.named("svg") if each.get("role") == "img")
    assert drawing["aria-label"] == "It rises." and len(page.named("td")) == 2
    assert "first" in page.text and "second" in page.text
    points = [each["points"] or "" for each in page.named("polyline")]
    assert points[-1] == "58.0,268.0 466.0,14.0"  # the first line is drawn last: from corner to corner


def test_an_interval_outside_of_its_scale_is_cut() -> None:
    assert "nan" not in interval(-1.0, 0.5, 2.0, (0.0, 1.0)) and math.isfinite(len(interval(0, 0, 0, (0, 0))))
