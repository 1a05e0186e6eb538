"""docs/guides/audit.md: its file, its lines of Python and its commands work in an empty folder."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from tests.cli.calls import clipwise

BLOCK = re.compile(r"```(?:python[^\n]*|bash)\n(.*?)```", re.DOTALL)
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "audit.md"
# Unchanged except for fewer runs.
FEWER = {"runs=100": "runs=2", "models=16": "models=6"}


@pytest.mark.slow
def test_a_new_user_can_follow_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, lines, commands, _ = BLOCK.findall(PAGE.read_text())
    for many, few in FEWER.items():
        assert many in lines
        lines = lines.replace(many, few)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_run", raising=False)
    Path("my_run.py").write_text(file)

    first, *rest = [shlex.split(line, comments=True) for line in commands.splitlines()]
    assert first == ["python", "my_run.py"]
    runpy.run_path("my_run.py", run_name="__main__")
    assert Path("runs/mine/ledger").is_file()
    for command, *arguments in rest:
        assert command == "clipwise"
        result = clipwise(*arguments, *(["--runs", 2] if arguments[0] == "audit" else []))
        assert result.exit_code == 0, result.output
        assert "As declared" in result.stdout
    assert Path("audit.png").is_file()

    exec(compile(lines, "docs/guides/audit.md", "exec"), {})
    del sys.modules["my_run"]
    printed = capsys.readouterr().out
    assert [line.split(",")[0].split(":")[0] for line in printed.strip().splitlines()] == [
        "dirac canary",
        "one run of many canaries",
        "loss threshold",
        "likelihood ratio",
    ]
