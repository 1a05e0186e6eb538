"""The command that measures the first steps of a run."""

from __future__ import annotations

import pytest

from benchmarks import start_up


def test_the_table_has_every_network_and_its_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_up, "SUBJECTS", {"MLP": start_up.SUBJECTS["MLP"]})
    *_, row = start_up.table(2, 3).splitlines()
    name, made, first, later, ratio, over_plain = (cell.strip() for cell in row.strip("|").split("|"))
    assert name == "MLP" and all(float(cell) > 0 for cell in (made, first, later, over_plain))
    assert float(ratio.split()[0]) == pytest.approx(float(first) / float(later), rel=0.2)
    assert ("not met" in ratio) == (float(ratio.split()[0]) > 3)
