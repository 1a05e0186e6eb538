"""The parts of the page on the run: data and model, released figures, configuration, audit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from clipwise.report import plain_words as words
from clipwise.report.page import charts
from clipwise.report.page.html import Content, Html, facts, items, markup, table, tag
from clipwise.report.record import RunRecord
from clipwise.report.run_statement import model_of, software

# The tables of config.toml that the page shows. [encoding] may be long, and [versions] has its own table.
SHOWN = ("run", "data", "privacy", "training", "evaluation")
LONGEST = 300
MANY_LINES = 40
INTERVAL = "The interval covers the added noise, if any, and the error of a finite sample."
COVERED = f"{INTERVAL} Figures on private rows are noised releases, and their cost is part of the guarantee."


def data_and_model(record: RunRecord) -> Html:
    """What was trained on what."""
    data, training = record.section("data"), record.section("training")
    pairs: list[tuple[Content, Content]] = [
        ("data", data.get("description") or "not recorded"),
        ("training rows", _count(record.training_rows)),
    ]
    if record.held_out_rows:
        pairs.append(("held-out rows", f"{_count(record.held_out_rows)}, chosen by row number"))
    if data.get("target") is not None:
        pairs.append(("target", str(data["target"])))
    pairs.append(("model", model_of(record) or "not recorded"))
    if "epochs" in training and "batch_size" in training:
        steps = f", {training['steps']} steps" if "steps" in training else ""
        epochs = f"{words.setting(training['epochs'])} epoch{'s' * (training['epochs'] != 1)}"
        pairs.append(("length", f"{epochs}{steps}, expected batch size {_count(training['batch_size'])}"))
    note = "Not recorded. If it looked at the private data, the guarantee does not cover it."
    lines = _preparation(record.preprocessing) if record.preprocessing else tag("p", note)
    return markup(facts(pairs), tag("h3", "Preparation of the data"), lines)


def _preparation(lines: tuple[str, ...]) -> Html:
    """The lines about the preparation; those of many columns can be opened."""
    if len(lines) <= MANY_LINES:
        return items(lines)
    return tag("details", tag("summary", f"Show {len(lines)} lines"), items(lines))


def accuracy(record: RunRecord) -> Html:
    """The released figures with their intervals."""
    if not record.released:
        return tag(
            "p", "No accuracy was released. Computing one on private rows without noise would void the guarantee."
        )
    names = list(dict.fromkeys(str(line.get("name")) for line in record.released))
    return markup(
        [_figures(record, name) for name in names],
        tag("p", COVERED if record.evaluation is not None else INTERVAL, cls="note"),
        _reference(record),
    )


def _figures(record: RunRecord, name: str) -> Html:
    lines = [line for line in record.released if str(line.get("name")) == name]
    ends = _ends(lines)
    rows = [
        [
            "all" if line.get("group") is None else str(line["group"]),
            tag("strong", words.value_of(line)),
            markup(words.interval_of(line), _picture(line, ends)),
            words.rows_of(record, line),
        ]
        for line in lines
    ]
    head = ("group", "value", "interval", "measured on")
    return table(name.capitalize(), head, rows)


def _ends(lines: list[Mapping[str, Any]]) -> tuple[float, float]:
    """The scale of the pictures: 0 to 100% for shares, else from 0 to the largest value."""
    if words.is_share(lines[0]):
        return 0.0, 1.0
    values = [line.get(key) for line in lines for key in ("low", "value", "high")]
    return 0.0, max((v for v in values if isinstance(v, (int, float)) and math.isfinite(v)), default=1.0)


def _picture(line: Mapping[str, Any], ends: tuple[float, float]) -> Html | None:
    values = [line.get(key) for key in ("low", "value", "high")]
    if not all(isinstance(v, (int, float)) and math.isfinite(v) for v in values):
        return None
    low, value, high = (float(v) for v in values if v is not None)
    if words.is_share(line) and (low, high) == ends:  # nothing is known
        return None
    return charts.interval(low, value, high, ends)


def _reference(record: RunRecord) -> Html | None:
    """The figure of a run without privacy on data that the user declared public."""
    reference = record.section("public_reference")
    if not reference:
        return None
    figures = f"{words.name_of(reference)} {words.value_of(reference)} ({words.interval_of(reference)})"
    text = f"A run without privacy, {reference.get('run')}, has {figures}. Its data were declared public by the user."
    return markup(tag("h3", "Without privacy"), tag("p", text))


def configuration(record: RunRecord) -> Html:
    """config.toml and the versions of the software."""
    tables = []
    for name in SHOWN:
        section = record.section(name)
        if section:
            rows = [(key.replace("_", " "), tag("code", _value(value))) for key, value in section.items()]
            tables.append(tag("div", tag("h3", f"[{name}]"), facts(rows)))
    if "encoding" in record.config:
        tables.append(tag("p", "The encoding of the inputs is in ", tag("code", "config.toml"), ".", cls="note"))
    found = [facts(sorted(each.items())) for each in software(record)]
    settings = tag("details", tag("summary", "Show the configuration"), tables) if tables else None
    return markup(tag("h3", "Software"), found or tag("p", "Not recorded."), settings)


def audit(record: RunRecord) -> Html:
    """The result of `clipwise audit`."""
    if record.audit is None:
        return tag(
            "p",
            "This run was not audited. An audit attacks the training program on data that is not private: ",
            tag("code", "clipwise audit RUN --json > RUN/audit.json"),
            ".",
        )
    passed = record.audit.get("ok") is True
    verdict = tag(
        "p",
        tag("span", "Passed." if passed else "Failed.", cls="passed" if passed else "failed"),
        " No attack exceeded what the guarantee allows. This is no proof."
        if passed
        else " An attack or a comparison of neighbouring data sets found more than the guarantee allows.",
    )
    rows = []
    for attack in record.audit.get("attacks") or []:
        claimed, measured = attack["claimed"], attack["measured"]
        figures = [_figure(side.get(key)) for key in ("epsilon", "mu") for side in (claimed, measured)]
        rows.append((str(measured.get("attack")), *figures, _figure(measured.get("confidence"))))
    head = ("attack", "epsilon, at most", "measured, at least", "mu, at most", "measured, at least", "confidence")
    findings = (record.audit.get("neighbours") or {}).get("findings") or []
    return markup(
        verdict,
        table("Attacks of the audit", head, rows, numeric=True) if rows else None,
        items(map(str, findings)) if findings else None,
    )


def _figure(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else "infinite"


def _count(rows: int | None) -> str:
    return "not recorded" if rows is None else f"{rows:,}"


def _value(value: object) -> str:
    text = words.setting(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
