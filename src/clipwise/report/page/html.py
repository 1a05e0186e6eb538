"""HTML as nested calls: `tag("p", "a < b", cls="note")`. Text is escaped; only `Html` is taken as it is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape, unescape
from typing import TypeAlias

# Elements without content or an end tag.
VOID = {"meta", "link", "br", "hr"}


class Html(str):
    """Markup made by this module."""

    __slots__ = ()


Content: TypeAlias = "str | int | float | Iterable[Content] | None"


def markup(*content: Content) -> Html:
    """The content as markup: strings are escaped, iterables are joined, None is left out."""
    return Html("".join(_pieces(content)))


def _pieces(content: Content) -> Iterable[str]:
    if content is None:
        return
    if isinstance(content, Html):
        yield content
    elif isinstance(content, (str, int, float)):
        yield escape(str(content), quote=False)
    else:
        for piece in content:
            yield from _pieces(piece)


def tag(name: str, /, *content: Content, **attributes: str | int | float | bool | None) -> Html:
    """An element. `cls` is the attribute class; "_" in a name is "-"; None and False are left out."""
    given = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = "class" if key == "cls" else key.replace("_", "-")
        given.append(f" {key}" if value is True else f' {key}="{escape(str(value))}"')
    start = f"<{name}{''.join(given)}>"
    return Html(start) if name in VOID else Html(f"{start}{markup(*content)}</{name}>")


def inline(text: str) -> Html:
    """Text in which `...` is code."""
    return markup([tag("code", piece) if n % 2 else piece for n, piece in enumerate(text.split("`"))])


def table(
    caption: Content,
    head: Iterable[Content],
    rows: Iterable[Iterable[Content]],
    *,
    numeric: bool = False,
    hidden_caption: bool = False,
) -> Html:
    """A table whose first column has the row headers, in a region that scrolls separately on narrow screens."""
    head, cls = list(head), "number" if numeric else None
    body = []
    for row in rows:
        first, *others = row
        body.append(tag("tr", tag("th", first, scope="row"), [tag("td", cell, cls=cls) for cell in others]))
    heading = [tag("th", cell, scope="col", cls=cls if n else None) for n, cell in enumerate(head)]
    name = markup(caption)
    return tag(
        "div",
        tag(
            "table",
            tag("caption", caption, cls="hidden" if hidden_caption else None),
            tag("thead", tag("tr", heading)),
            tag("tbody", body),
        ),
        cls="scroll",
        role="region",
        tabindex=0,
        aria_label=unescape(re.sub("<[^>]*>", "", name)),
    )


def facts(pairs: Iterable[tuple[Content, Content]]) -> Html:
    """A list of terms and their descriptions."""
    return tag("dl", [tag("div", tag("dt", term), tag("dd", what)) for term, what in pairs], cls="facts")


def items(lines: Iterable[Content]) -> Html:
    """A bulleted list."""
    return tag("ul", [tag("li", line) for line in lines])
