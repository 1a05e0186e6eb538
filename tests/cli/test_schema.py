from __future__ import annotations

from pathlib import Path

import pytest

from clipwise.ledger import read
from clipwise.noise.key import NoiseKey
from clipwise.recipes.tables import TableSource, read_schema
from clipwise.recipes.tables.schema import Auto, Number
from tests.cli.calls import clipwise, figure, refused


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.csv"
    rows = (f"{20 + i % 50},{'Rom' if i % 3 else 'Ulm'},{'yes' if i % 4 else 'no'}" for i in range(4000))
    path.write_text("age,city,bought\n" + "\n".join(rows) + "\n")
    return path


def test_a_draft_from_the_header_reads_no_row(data: Path, tmp_path: Path) -> None:
    data.write_bytes(b"age,city,bought\n1,2\n\xff\xfe")  # rows that cannot be read
    out = tmp_path / "schema.toml"
    result = clipwise("schema", data, "--target", "bought", "--out", out)
    assert result.exit_code == 0 and "3 columns" not in result.stdout and "cost no privacy" in result.stdout
    schema = read_schema(out)
    assert schema.columns == {"age": Auto(), "city": Auto()} and schema.target is not None
    assert schema.target.name == "bought" and "# Only the names are known" in out.read_text()


def test_a_draft_from_noised_counts_is_charged(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NoiseKey, "fresh", lambda: NoiseKey.from_seed(0))
    out = tmp_path / "schema.toml"
    result = clipwise("schema", data, "--target", "bought", "--epsilon", 1, "--out", out)
    assert result.exit_code == 0, result.output
    schema = read_schema(out)
    age = schema.columns["age"]
    assert isinstance(age, Number) and all(15 < p < 90 for p in age.points[1:-1])  # noise may move the outermost
    assert schema.target is not None and schema.target.labels == ("no", "yes")
    assert "epsilon 1 at delta 1e-05" in out.read_text() and "# Noised counts: a number" in out.read_text()
    assert "--ledger runs/NAME/evaluation.ledger" in out.read_text()
    (entry,) = read(tmp_path / "schema.ledger").history
    assert entry.count == 1 and entry.event.excess == 1e-9
    assert figure(clipwise("epsilon", "--ledger", tmp_path / "schema.ledger"), "PLD") == pytest.approx(1, abs=2e-3)
    source = TableSource(data, schema=schema)
    assert not source.needs_counts()
    again = clipwise(
        "schema", data, "--epsilon", 1, "--out", tmp_path / "2.toml", "--ledger", tmp_path / "schema.ledger"
    )
    assert again.exit_code == 0 and read_schema(tmp_path / "2.toml").target is None
    assert len(read(tmp_path / "schema.ledger").history) == 2


def test_regression_and_labels(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "schema.toml"
    assert clipwise("schema", data, "--target", "age", "--epsilon", 2, "--out", out).exit_code == 0
    schema = read_schema(out)
    assert schema.target is not None and schema.target.range is not None and "range is from noised" in out.read_text()
    out.unlink()
    assert clipwise("schema", data, "--target", "bought", "--labels", "no, yes", "--out", out).exit_code == 0
    schema = read_schema(out)
    assert schema.target is not None and schema.target.labels == ("no", "yes")


def test_refusals(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "schema.toml"
    refused(clipwise("schema", data, "--target", "income", "--out", out), "--target", "age, city, bought")
    refused(clipwise("schema", tmp_path / "none.csv", "--out", out), "is not a file")
    refused(clipwise("schema", data, "--labels", "a,b", "--out", out), "need --target")
    refused(clipwise("schema", data, "--target", "age", "--task", "rank", "--out", out), "--task")
    refused(clipwise("schema", data, "--epsilon", 0, "--out", out), "--epsilon")
    refused(clipwise("schema", data, "--ledger", tmp_path / "l", "--out", out), "--ledger needs --epsilon")
    refused(clipwise("schema", data, "--out", data / "s.toml"), "cannot be written")
    out.write_text("")
    refused(clipwise("schema", data, "--out", out), "exists already")
    refused(clipwise("schema", data, "--encoding", "klingon", "--out", tmp_path / "2"), "--encoding klingon")


def test_delta_is_below_one_over_the_number_of_rows(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("age,bought\n" + "40,yes\n50,no\n" * 10_000)
    options = ("schema", tmp_path / "data.csv", "--epsilon", 1, "--out", tmp_path / "schema.toml")
    refused(clipwise(*options, "--delta", 1e-4), "--delta")
    assert "at delta 5e-06" in clipwise(*options).stdout
