"""Every code block of the documentation runs and prints the output on its page."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.documented import BLOCK, DOCS, PAGES, README, given, rerun

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
FENCE = re.compile(r"^[ \t]*```.*$", re.MULTILINE)


def comparable(block: str) -> list[str]:
    """Return the lines without versions, with normalised column widths."""
    return [re.sub(r"[\s─━]+", " ", line) for line in block.splitlines() if "python 3." not in line]


def _with_examples() -> list[Any]:
    """The pages with blocks. Those of docs/integrations need frameworks."""
    return [
        pytest.param(page, id=page.stem, marks=[pytest.mark.integration] if page.parent.name == "integrations" else [])
        for page in (*PAGES, README)
        if BLOCK.search(page.read_text())
    ]


@pytest.mark.parametrize("page", _with_examples())
def test_every_example_prints_what_the_page_shows(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)
    for old, new in rerun(page.read_text(), in_full=False, names=given() if page == README else None):
        for written, printed in zip(comparable(old), comparable(new), strict=True):
            assert NUMBER.sub("#", written) == NUMBER.sub("#", printed), new
            shown, found = ([float(n) for n in NUMBER.findall(line)] for line in (written, printed))
            assert shown == pytest.approx(found, rel=0.15 if "accuracy" in written else 0.005), new
    for name in {path.stem for path in tmp_path.glob("*.py")} - known:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("page", [*PAGES, README], ids=lambda p: p.stem)
def test_every_block_has_a_known_language(page: Path) -> None:
    """The test above does not run blocks without a language."""
    begins = FENCE.findall(page.read_text())[::2]
    for fence in begins:
        assert re.match(r"```((console|python|text|bash|toml)\b|\{\.text \.diagram\}$|$)", fence), (
            f"{page.relative_to(DOCS.parent)}: {fence}"
        )
