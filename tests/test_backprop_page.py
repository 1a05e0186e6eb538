"""docs/backprop.md tells the truth: every example runs, and prints what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documented import rerun
from tests.test_documented import NUMBER, comparable

PAGE = Path(__file__).parent.parent / "docs" / "backprop.md"


def test_every_example_prints_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for old, new in rerun(PAGE.read_text()):
        for written, printed in zip(comparable(old), comparable(new), strict=True):
            assert NUMBER.sub("#", written) == NUMBER.sub("#", printed), new
            said, found = ([float(n) for n in NUMBER.findall(line)] for line in (written, printed))
            assert said == pytest.approx(found, rel=0.005), new
