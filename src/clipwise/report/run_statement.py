"""The statement of a whole run: what was trained on what, the two ledgers, and the figures that were released.

statement.json is for programs and has `FORMAT`; `describe` is the same in plain English.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clipwise.errors import ConfigurationError
from clipwise.ledger.run_description import plain, versions
from clipwise.report import plain_words as words
from clipwise.report import wording
from clipwise.report.record import RunRecord

FORMAT = 2
FILE = "statement.json"


def run_statement(run: RunRecord | Path | str) -> dict[str, Any]:
    """The statement of a run in JSON types.

    Args:
        run: the folder of the run, its ledger file, or what was read from them.
    """
    record = run if isinstance(run, RunRecord) else RunRecord.read(run)
    record.require_one_unit()
    data = record.section("data")
    content = {
        "format": FORMAT,
        "run": record.name,
        "guarantee": None if record.no_guarantee else {"epsilon": record.epsilon, "delta": record.delta},
        "no_guarantee": record.no_guarantee,
        "composition": words.composition(record) if record.ledgers else None,
        "data": {
            "description": data.get("description"),
            "rows": record.dataset_size,
            "training_rows": record.training_rows,
            "held_out_rows": record.held_out_rows,
            "kind": data.get("kind"),
            "target": data.get("target"),
        },
        "preprocessing": record.preprocessing,
        "model": model_of(record),
        "training": record.training.to_dict() if record.training else None,
        "evaluation": _evaluation(record),
        "accuracy": [{k: v for k, v in line.items() if k != "kind"} for line in record.released],
        "public_reference": record.section("public_reference") or None,
    }
    result: dict[str, Any] = plain(content)
    return result


def write_statement(folder: Path | str) -> Path:
    """Write statement.json to the folder of a run."""
    file = Path(folder) / FILE
    text = json.dumps(run_statement(folder), indent=2, allow_nan=False, ensure_ascii=False)
    return write_text(file, text + "\n")


def write_text(file: Path, text: str) -> Path:
    """Write a file of a run. Raises a readable error if that is not possible."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be written: {error.strerror}.") from error
    return file


def model_of(record: RunRecord) -> str | None:
    """The name of the model and its number of training steps."""
    name = record.section("training").get("model")
    return None if name is None else str(name)


def describe(record: RunRecord) -> str:
    """The statement of a run in plain English, one line for each fact."""
    record.require_one_unit()
    if record.no_guarantee is None:
        lines = [("guarantee", words.formal(record)), ("in words", words.guarantee(record))]
    else:
        lines = [("guarantee", f"NONE. {record.no_guarantee}")]
    if record.no_guarantee is None and (state := words.state(record)) is not None:
        lines.append(("state", state))
    lines += _about_data(record)
    if record.training is not None:
        s = record.training.spent
        lines.append(
            (
                "training",
                f"{words.releases(s.steps)}; epsilon {words.figure(s.epsilon)} at delta {wording.small(s.delta)}",
            )
        )
    if record.evaluation is not None:
        s = record.evaluation.spent
        lines.append(
            ("evaluation", f"{words.releases(s.steps)} on the held-out rows; epsilon {words.figure(s.epsilon)}")
        )
    if record.ledgers:
        lines.append(("composition", words.composition(record)))
    if record.no_guarantee is None:
        lines.append(("attacker", words.detection(record)))
    lines += [("result", words.result(record, line)) for line in record.released]
    if record.no_guarantee is None:
        lines.append(("derived", words.POST_PROCESSING))
        lines += [("assumption", text) for text in assumptions(record)]
        lines += [("not covered", text) for text in words.not_covered(record)]
    lines += [("software", wording.listed(found)) for found in software(record)]
    lines.append(("read with", wording.listed(versions())))
    return "\n".join([f"Privacy statement of run {record.name}", *wording.labelled(lines)])


def assumptions(record: RunRecord) -> list[str]:
    """The assumptions of the guarantee."""
    found = list(record.training.assumptions()) if record.training is not None else []
    return [*found, words.SPLIT] if record.evaluation is not None else found


def software(record: RunRecord) -> list[Mapping[str, Any]]:
    """The versions of the software of the run: from its ledgers, or from its configuration."""
    found = wording.distinct(versions for statement in record.ledgers for versions in statement.software())
    return found or wording.distinct([record.section("versions")])


def _about_data(record: RunRecord) -> list[tuple[str, str]]:
    data = record.section("data")
    lines = []
    if data.get("description"):
        lines.append(("data", str(data["description"])))
    if record.training_rows is not None:
        held_out = f" and {record.held_out_rows} held-out rows" if record.held_out_rows else ""
        lines.append(("rows", f"{record.training_rows} training rows{held_out}; the numbers are public"))
    if data.get("target") is not None:
        lines.append(("target", str(data["target"])))
    lines += [("preparation", line) for line in record.preprocessing]
    if (model := model_of(record)) is not None:
        lines.append(("model", model))
    return lines


def _evaluation(record: RunRecord) -> dict[str, Any] | None:
    """The statement of the second ledger; its releases are figures, not weights."""
    if record.evaluation is None:
        return None
    return record.evaluation.to_dict() | {"released": words.EVALUATED, "weights": words.NO_WEIGHTS}
