"""`--help` prints the help and writes no page."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.audit import recovery


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["--mu", "3"], 2)])
def test_recovery_does_not_measure_with_help(
    arguments: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recovery, "PAGE", tmp_path / "audit.md")
    monkeypatch.setattr(recovery, "ATTACKS", {})
    with pytest.raises(SystemExit) as end:
        recovery.main(arguments)
    assert end.value.code == code and "usage: python -m experiments audit/recovery" in "".join(capsys.readouterr())
    assert not (tmp_path / "audit.md").exists()
