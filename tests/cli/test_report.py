"""`clipwise report`, and the exports of `clipwise statement`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.calls import clipwise, refused, write_ledger


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_ledger(tmp_path / "ledger", 9)
    return tmp_path


def test_a_report_is_written_into_the_folder(folder: Path) -> None:
    result = clipwise("report", folder)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"Report written to {folder / 'report.html'}\n"
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_several_runs_are_compared(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    other = write_ledger(tmp_path / "other.ledger", 5)
    assert clipwise("report", folder / "ledger", other).stdout == "Report written to comparison.html\n"
    assert clipwise("report", folder / "ledger", other, "--out", "x.html").exit_code == 0
    assert "other.ledger" in Path("x.html").read_text() and "Comparison" in Path("comparison.html").read_text()


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    (empty := tmp_path / "empty").mkdir()
    refused(clipwise("report", empty), "not the folder of a run")
    refused(clipwise("report", tmp_path / "nothing"), "does not exist")
    refused(clipwise("report", folder, folder), "given twice")
    refused(clipwise("report", folder, "--out", empty), "is a folder")


def test_exports_of_the_statement(folder: Path) -> None:
    assert json.loads(clipwise("statement", folder, "--json").stdout)["format"] == 2
    assert clipwise("statement", folder).stdout.startswith("Privacy statement of run")
    for run in (folder, folder / "ledger"):
        assert json.loads(clipwise("statement", run, "--registry").stdout)["tier"] == 3
        assert clipwise("statement", run, "--nist").stdout.startswith("# NIST SP 800-226 checklist")
        assert clipwise("statement", run, "--model-card").stdout.startswith("---\n")
    refused(clipwise("statement", folder, "--nist", "--json"), "only one of")
    with_delta = json.loads(clipwise("statement", folder, "--json", "--delta", 1e-7).stdout)
    assert with_delta["guarantee"]["delta"] == 1e-7
