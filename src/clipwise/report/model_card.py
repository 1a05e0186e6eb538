"""A model card for a model hub: Markdown with a YAML header."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from clipwise.report import plain_words as words
from clipwise.report import wording
from clipwise.report.record import RunRecord
from clipwise.report.run_statement import model_of, software, write_text

FILE = "model_card.md"
TAGS = ("differential-privacy", "clipwise")
TASKS = {"table": "tabular-classification", "images": "image-classification", "text": "text-classification"}
TO_FILL_IN = "To be filled in by the publisher of the model."


def write_model_card(folder: Path | str) -> Path:
    """Write model_card.md to the folder of a run."""
    return write_text(Path(folder) / FILE, model_card(RunRecord.read(folder)))


def model_card(record: RunRecord) -> str:
    """The model card of a run."""
    record.require_one_unit()
    sections = [
        ("Privacy", _privacy(record)),
        ("Training data", _data(record)),
        ("Results", _results(record)),
        ("Intended use", [TO_FILL_IN]),
        ("Limits", _limits(record)),
        ("Training", _training(record)),
    ]
    body = [f"# {plain_text(record.name)}", ""]
    for title, lines in sections:
        body += [f"## {title}", "", *lines, ""] if lines else []
    return f"{_header(record)}\n{chr(10).join(body).rstrip()}\n"


def plain_text(text: Any) -> str:
    """Text that Markdown shows as it is: on one line, without markup."""
    line = escape(" ".join(str(text).split()), quote=False)
    return "".join(f"\\{char}" if char in "\\`*_[]|#!~" else char for char in line)


def _header(record: RunRecord) -> str:
    """YAML; strings are written as JSON, which YAML includes."""
    fields: dict[str, Any] = {
        "library_name": "pytorch",
        "tags": list(TAGS if record.no_guarantee is None else TAGS[1:]),
    }
    kind = record.section("data").get("kind")
    if kind in TASKS:
        is_regression = any(not words.is_share(line) for line in record.released)
        fields["pipeline_tag"] = "tabular-regression" if is_regression and kind == "table" else TASKS[kind]
    if record.released:
        fields["metrics"] = sorted({str(line.get("name")) for line in record.released})
    return "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in fields.items()), "---", ""])


def _privacy(record: RunRecord) -> list[str]:
    if record.no_guarantee is not None:
        return [f"> **{words.NOT_PRIVATE_TITLE}.** {record.no_guarantee}"]
    bullets = [
        words.formal(record),
        f"Gaussian differential privacy with mu {words.figure(record.risks.mu, 3)}, up to delta",
        words.detection(record),
        words.composition(record),
    ]
    if (state := words.state(record)) is not None:
        bullets.append(state)
    return [words.guarantee(record), "", *(f"- {line}" for line in bullets)]


def _data(record: RunRecord) -> list[str]:
    data = record.section("data")
    lines = [f"- {plain_text(data['description'])}"] if data.get("description") else []
    if record.training_rows is not None:
        held_out = f", {record.held_out_rows} held-out rows" if record.held_out_rows else ""
        lines.append(f"- {record.training_rows} training rows{held_out}")
    if data.get("target") is not None:
        lines.append(f"- Target: {plain_text(data['target'])}")
    return lines + [f"- {plain_text(line)}" for line in record.preprocessing]


def _results(record: RunRecord) -> list[str]:
    if not record.released:
        return []
    rows = [
        [plain_text(words.name_of(line)), words.value_of(line), words.interval_of(line), words.rows_of(record, line)]
        for line in record.released
    ]
    head = ["figure", "value", "interval", "measured on"]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * 4, *rows)]


def _limits(record: RunRecord) -> list[str]:
    if record.no_guarantee is not None:
        return []
    return ["The guarantee does not cover:", "", *(f"- {line}" for line in words.not_covered(record))]


def _training(record: RunRecord) -> list[str]:
    settings = record.section("training")
    lines = [f"- Model: {plain_text(model_of(record))}"] if model_of(record) else []
    for name in ("optimizer", "epochs", "steps", "batch_size", "learning_rate", "max_norm", "noise_multiplier"):
        if name in settings:
            lines.append(f"- {name.replace('_', ' ').capitalize()}: {plain_text(words.setting(settings[name]))}")
    lines += [f"- Software: {wording.listed(found)}" for found in software(record)]
    return [*lines, "- The full statement is in `statement.json`, and the report in `report.html`."]
