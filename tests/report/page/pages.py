"""Parsing of a page with the standard library."""

from __future__ import annotations

from html.parser import HTMLParser

from clipwise.report.page.html import VOID

# Attributes that make a browser load or open an address.
LINKS = {"src", "href", "action", "poster", "data", "srcset", "xlink:href", "background", "formaction"}


class Page(HTMLParser):
    """The elements, links, ids and text of a page. Raises if tags are not balanced."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.pieces: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.pieces.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.pieces).split())

    @property
    def ids(self) -> list[str]:
        return [found for _, attributes in self.elements if (found := attributes.get("id")) is not None]

    @property
    def links(self) -> list[str]:
        return [value or "" for _, each in self.elements for name, value in each.items() if name in LINKS]

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]
