"""Charts as inline SVG, with a text alternative and a table of their data. Lines differ in dashes and colour."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from clipwise.report.page.html import Content, Html, table, tag

WIDTH, HEIGHT = 480, 320
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 14, 52
# The styles of lines in style.css: colour and dashes.
MOST_LINES = 6
REFERENCE = 1  # the style of a line to compare with


@dataclass(frozen=True)
class Line:
    """A line of a chart."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    style: int = 0  # the number of its colour and dashes, below MOST_LINES


@dataclass(frozen=True)
class Axis:
    """An axis from 0 to `end`, linear."""

    label: str
    end: float
    whole: bool = False

    def ticks(self) -> list[float]:
        """Round values from 0 to the end, about five of them."""
        if self.end <= 0:
            return [0.0]
        step = 10.0 ** math.floor(math.log10(self.end / 5))
        step *= next(factor for factor in (1, 2, 2.5, 5, 10) if self.end / (step * factor) <= 6)
        if self.whole:
            step = max(1.0, float(math.ceil(step)))
        return [n * step for n in range(math.floor(self.end / step + 1e-9) + 1)]

    def share(self, value: float) -> float:
        """The place of a value, from 0 to 1."""
        return min(1.0, max(0.0, value / self.end)) if self.end > 0 else 0.0


def figure(
    name: str,
    title: str,
    summary: str,
    lines: Sequence[Line],
    axes: tuple[Axis, Axis],
    data: tuple[Sequence[Content], Sequence[Sequence[Content]]],
    *,
    note: Content = None,
) -> Html:
    """A line chart.

    Args:
        name: an id that is unique on the page.
        title: the caption.
        summary: what the chart shows, for readers who do not see it.
        lines: at most `MOST_LINES` lines; the first one is the most important.
        axes: the horizontal and the vertical axis.
        data: the head and the rows of its table of data.
        note: text below the chart.
    """
    legend = tag("ul", [tag("li", _sample(line), line.label) for line in lines], cls="legend")
    return tag(
        "figure",
        tag("figcaption", title, id=f"chart-{name}"),
        legend if len(lines) > 1 else None,
        _drawing(lines, *axes, summary),
        tag("p", note, cls="note") if note is not None else None,
        tag("details", tag("summary", "Data of this chart"), table(f"{title}: data", *data, hidden_caption=True)),
        cls="chart",
        aria_labelledby=f"chart-{name}",
    )


def dots(filled: float, label: str) -> Html:
    """100 dots, the first of them filled: a share as natural frequency, rounded up."""
    count = min(100, math.ceil(filled - 1e-9))
    circles = [
        tag("circle", cx=8 + 14 * (n % 10), cy=8 + 14 * (n // 10), r=5, cls="on" if n < count else "off")
        for n in range(100)
    ]
    return tag("svg", circles, viewBox="0 0 142 142", role="img", aria_label=label, cls="dots")


def interval(low: float, value: float, high: float, ends: tuple[float, float]) -> Html:
    """A small picture of an interval, beside the same figures in text."""
    start, end = ends
    width = (end - start) or 1.0
    at = [2 + 216 * min(1.0, max(0.0, (v - start) / width)) for v in (low, value, high)]
    return tag(
        "svg",
        tag("line", x1=2, x2=218, y1=9, y2=9, cls="grid"),
        tag("line", x1=f"{at[0]:.1f}", x2=f"{at[2]:.1f}", y1=9, y2=9, cls="whisker"),
        tag("circle", cx=f"{at[1]:.1f}", cy=9, r=4, cls="on"),
        viewBox="0 0 220 18",
        aria_hidden="true",
        cls="interval",
    )


def _drawing(lines: Sequence[Line], x: Axis, y: Axis, summary: str) -> Html:
    pieces: list[Html] = []
    for value in y.ticks():
        level = _down(y.share(value))
        pieces.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=level, y2=level, cls="grid"))
        pieces.append(tag("text", _short(value), x=LEFT - 8, y=level, dy="0.35em", text_anchor="end"))
    for value in x.ticks():
        place = _across(x.share(value))
        pieces.append(tag("line", x1=place, x2=place, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM + 5, cls="tick"))
        pieces.append(tag("text", _short(value), x=place, y=HEIGHT - BOTTOM + 20, text_anchor="middle"))
    level = HEIGHT - BOTTOM
    pieces.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=level, y2=level, cls="tick"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    pieces.append(tag("text", x.label, x=middle, y=HEIGHT - 8, text_anchor="middle", cls="axis"))
    centre = (TOP + HEIGHT - BOTTOM) / 2
    turned = f"rotate(-90 14 {centre:g})"
    pieces.append(tag("text", y.label, x=14, y=centre, text_anchor="middle", transform=turned, cls="axis"))
    for line in reversed(lines):  # the first line on top
        points = zip(line.xs, line.ys, strict=True)
        path = " ".join(f"{_across(x.share(a))},{_down(y.share(b))}" for a, b in points)
        pieces.append(tag("polyline", points=path, cls=f"line line-{line.style}"))
    return tag("svg", pieces, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=summary)


def _sample(line: Line) -> Html:
    """A piece of a line, for the legend."""
    piece = tag("line", x1=0, x2=30, y1=5, y2=5, cls=f"line line-{line.style}")
    return tag("svg", piece, viewBox="0 0 30 10", aria_hidden="true", cls="sample")


def _across(share: float) -> float:
    return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)


def _down(share: float) -> float:
    return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}" if value == round(value, 6) else f"{value:.3g}"
