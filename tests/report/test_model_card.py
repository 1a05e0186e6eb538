"""The model card: YAML header and Markdown."""

from __future__ import annotations

import re
from pathlib import Path

from clipwise.report.model_card import model_card, plain_text, write_model_card
from clipwise.report.record import RunRecord
from tests.report.run_folders import run_folder

yaml = __import__("yaml")  # comes with mkdocs


def header(card: str) -> dict[str, object]:
    _, text, _ = re.split(r"^---$", card, maxsplit=2, flags=re.MULTILINE)
    found: dict[str, object] = yaml.safe_load(text)
    return found


def test_the_header(record: RunRecord, not_private: Path) -> None:
    found = header(model_card(record))
    assert found["tags"] == ["differential-privacy", "clipwise"] and found["pipeline_tag"] == "tabular-classification"
    assert "differential-privacy" not in str(header(model_card(RunRecord.read(not_private))))


def test_the_text(record: RunRecord, not_private: Path) -> None:
    card = model_card(record)
    assert "## Privacy" in card and "| accuracy | 83.0% |" in card and "## Limits" in card
    assert "**No privacy guarantee.**" in model_card(RunRecord.read(not_private))


def test_names_of_a_user_are_no_markup(tmp_path: Path) -> None:
    folder = run_folder(
        tmp_path / "run",
        private=False,
        evaluated=False,
        name="a: [b]\n# c",
        description="<script>alert(1)</script> [x](http://y)",
        group="a | b",
    )
    card = write_model_card(folder).read_text()
    assert "<script" not in card and "[x](" not in card and "a \\| b" in card and "\n# c" not in card
    header(card)
    assert plain_text("a\nb_c") == "a b\\_c"
