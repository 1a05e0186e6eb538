"""The frame of a page: head, style, header, sections, footer. It makes no request: style and charts are inline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from clipwise import __version__
from clipwise.report.page.html import Content, Html, markup, tag

# No script, no request of any kind; the style is in the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"

FOOTER = (
    f"Written by clipwise {__version__}. All figures of a guarantee are computed from the ledger of the run. This page "
    "is one file and makes no network requests."
)


@dataclass(frozen=True)
class Section:
    """A section of a page; without content it is left out."""

    name: str
    title: str
    content: Content


def document(title: str, head: Iterable[Content], sections: Sequence[Section]) -> str:
    """A whole page."""
    shown = [section for section in sections if section.content]
    links = [tag("li", tag("a", section.title, href=f"#{section.name}")) for section in shown]
    body = markup(
        tag("a", "Skip to the report", href="#report", cls="skip"),
        tag(
            "main",
            tag("header", *head),
            tag("nav", tag("ul", links), aria_label="Contents"),
            map(_section, shown),
            id="report",
        ),
        tag("footer", tag("p", FOOTER)),
    )
    head_of_page = markup(
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="referrer", content="no-referrer"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", Html(_style())),
    )
    return f"<!doctype html>\n{tag('html', tag('head', head_of_page), tag('body', body), lang='en')}\n"


def _section(section: Section) -> Html:
    heading = tag("h2", section.title, id=f"{section.name}-title")
    return tag("section", heading, section.content, id=section.name, aria_labelledby=f"{section.name}-title")


@cache
def _style() -> str:
    return files(__package__).joinpath("style.css").read_text(encoding="utf-8")
