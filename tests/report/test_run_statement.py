"""The statement of a whole run, for programs and in plain English."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from clipwise.report.record import RunRecord
from clipwise.report.run_statement import FORMAT, describe, run_statement, software, write_statement
from clipwise.report.statement import of_ledger
from tests.cli.calls import write_ledger
from tests.report.run_folders import LINES


def test_the_statement_of_a_run(run: Path) -> None:
    found = json.loads(json.dumps(run_statement(run), allow_nan=False))
    training = of_ledger(run / "ledger")
    assert found["format"] == FORMAT and found["run"] == "income"
    assert found["guarantee"] == {"epsilon": training.spent.epsilon, "delta": 1e-5}
    assert found["data"]["training_rows"] == 40 and found["data"]["held_out_rows"] == 10
    assert found["preprocessing"] == list(LINES) and found["model"] == "mlp"
    assert found["training"] == json.loads(json.dumps(training.to_dict()))
    assert "parallel composition" in found["composition"]
    assert found["evaluation"]["spent"]["steps"] == 1 and "held-out rows" in found["evaluation"]["released"]
    assert [line["value"] for line in found["accuracy"]] == [0.83, 0.8] and found["public_reference"] is None


def test_runs_without_guarantee_state_none(seeded: Path, not_private: Path) -> None:
    assert run_statement(seeded)["guarantee"] is None and "seed" in run_statement(seeded)["no_guarantee"]
    found = run_statement(not_private)
    assert found["guarantee"] is None and found["training"] is None and found["composition"] is None
    assert describe(RunRecord.read(not_private)).splitlines()[1].startswith("  guarantee    NONE.")


def test_it_is_written_to_the_folder(run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "copy"))
    assert json.loads(write_statement(folder).read_text()) == run_statement(folder)


def test_in_words(record: RunRecord) -> None:
    text = describe(record)
    for label in ("guarantee", "in words", "rows", "composition", "attacker", "result", "assumption", "not covered"):
        assert f"\n  {label:<12} " in text, label
    assert "40 training rows and 10 held-out rows" in text and "83.0% (79.0% to 87.0%, 95% confidence)" in text
    assert "row number only" in text and "\n  state" not in text


def test_equal_software_is_named_once(record: RunRecord) -> None:
    assert record.training is not None
    (process,) = record.training.processes
    training = replace(record.training, processes=(process, replace(process, key="other")))
    assert len(software(replace(record, training=training))) == 1


def test_an_open_run_is_not_verified(tmp_path: Path) -> None:
    text = describe(RunRecord.read(write_ledger(tmp_path / "ledger", 9, close=False)))
    assert "\n  state        The run is in progress" in text


def test_every_line_is_explained(record: RunRecord) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "statement.md").read_text()
    labels = {line[2:15].strip() for line in describe(record).splitlines()[1:]} - {""}
    for label in labels | {"state"}:
        assert f"| {label} |" in page or f"| {label}, " in page or f", {label} |" in page, label
    for field in run_statement(record):
        assert f"`{field}`" in page, field
