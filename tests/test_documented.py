"""docs/accounting.md tells the truth: every example runs, and prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.documented import PAGE, rerun

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def comparable(block: str) -> list[str]:
    """The lines but those that name versions, with columns as wide as they are elsewhere."""
    return [re.sub(r"[\s─━]+", " ", line) for line in block.splitlines() if "python 3." not in line]


def test_every_example_prints_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for old, new in rerun(PAGE.read_text()):
        for written, printed in zip(comparable(old), comparable(new), strict=True):
            assert NUMBER.sub("#", written) == NUMBER.sub("#", printed), new
            said, found = ([float(n) for n in NUMBER.findall(line)] for line in (written, printed))
            assert said == pytest.approx(found, rel=0.005), new
