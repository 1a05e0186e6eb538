"""HTML as nested calls: text is escaped, markup is not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from clipwise.report.page.html import facts, inline, items, markup, table, tag
from tests.report.page.pages import Page


def test_text_is_escaped_and_markup_is_not() -> None:
    assert tag("p", "a < b & c") == "<p>a &lt; b &amp; c</p>"
    assert tag("p", tag("b", "x"), [1, " ", 2.5], None) == "<p><b>x</b>1 2.5</p>"
    assert markup("<i>") + tag("br") == "&lt;i&gt;<br>"


def test_attributes() -> None:
    made = tag("a", cls="x", aria_label='"&', hidden=True, title=None, open=False)
    assert made == '<a class="x" aria-label="&quot;&amp;" hidden></a>'


@given(st.text())
def test_no_text_becomes_an_element(text: str) -> None:
    made = tag("div", table(text, [text, text], [[text, text]]), facts([(text, text)]), items([text]), title=text)
    names = {name for name, _ in Page(made).elements}
    assert names == {"div", "table", "caption", "thead", "tbody", "tr", "th", "td", "dl", "dt", "dd", "ul", "li"}


def test_code_in_text() -> None:
    assert inline("run `a < b` now") == "run <code>a &lt; b</code> now"


def test_tables_have_headings_for_rows_and_columns() -> None:
    made = table(tag("b", "x & y"), ["a", "b"], [["r", 1]])
    assert '<th scope="row">r</th><td>1</td>' in made and '<th scope="col">b</th>' in made
    assert 'aria-label="x &amp; y"' in made
