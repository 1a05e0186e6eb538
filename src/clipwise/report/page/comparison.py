"""Several runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from clipwise.report import plain_words as words
from clipwise.report import wording
from clipwise.report.page import charts
from clipwise.report.page.document import Section, document
from clipwise.report.page.guarantee import DRAWN, SHOWN, spent_over_steps, warning_box
from clipwise.report.page.html import Content, Html, inline, items, markup, table, tag
from clipwise.report.record import RunRecord

TITLE = "Comparison of runs"
# The styles of the lines of runs.
STYLES = [style for style in range(charts.MOST_LINES) if style != charts.REFERENCE]


def comparison(records: Sequence[RunRecord]) -> str:
    """The page that compares runs."""
    records = _with_distinct_names(records)
    private = [record for record in records if record.no_guarantee is None]
    without = [record for record in records if record.no_guarantee is not None]
    head: list[Content] = []
    if without:
        lines = [markup(tag("strong", record.name), ": ", record.no_guarantee) for record in without]
        head.append(warning_box(items(lines)))
    head += [
        tag("p", "Privacy report", cls="kind"),
        tag("h1", TITLE),
        tag("p", f"{len(records)} runs. Each line is the cost of one run alone.", cls="lead"),
    ]
    several = (
        "Runs on the same records compose: publishing several of these models, or choosing one of them by looking at "
        "its results, costs more than each line. The joint cost is printed by `clipwise epsilon --ledger A --ledger B`."
    )
    sections = [
        Section(
            "guarantees", "Guarantees", markup(_guarantees(records), tag("p", inline(several))) if records else None
        ),
        Section("accuracy", "Accuracy as released", _accuracy(records)),
        Section("curves", "How much an attacker learns", _curves(private)),
        Section("settings", "Settings", _settings(records)),
    ]
    return document(TITLE, head, sections)


def _with_distinct_names(records: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs, named by their paths where two have the same name."""
    names = [record.name for record in records]
    return [replace(r, name=str(r.path)) if names.count(r.name) > 1 else r for r in records]


def _guarantees(records: Sequence[RunRecord]) -> Html:
    rows: list[list[Content]] = []
    for record in records:
        if record.no_guarantee is None:
            s, risks = record.ledgers[0].spent, record.risks
            figures = [words.figure(record.epsilon), wording.small(record.delta), words.figure(risks.mu, 3)]
            rows.append(
                [record.name, *figures, wording.percent(risks.power(0.01), 3), f"{s.adjacency} of one {s.unit}"]
            )
        else:
            rows.append([record.name, tag("span", "none", cls="failed"), "", "", "", ""])
    head = ("run", "epsilon, at most", "delta", "mu, at most", "detected at 1% false alarms", "neighbours, unit")
    return table("Guarantee of each run", head, rows, numeric=True)


def _accuracy(records: Sequence[RunRecord]) -> Html | None:
    lines = [(record, line) for record in records for line in record.released if line.get("group") is None]
    rows = [
        [
            record.name,
            str(line.get("name")),
            tag("strong", words.value_of(line)),
            words.interval_of(line),
            words.rows_of(record, line),
        ]
        for record, line in lines
    ]
    return table("Released figures", ("run", "figure", "value", "interval", "measured on"), rows) if rows else None


def _curves(records: Sequence[RunRecord]) -> Html | None:
    shown = records[: len(STYLES)]
    if not shown:
        return None
    lines = [
        charts.Line(record.name, DRAWN, [record.risks.missed(a) for a in DRAWN], style)
        for record, style in zip(shown, STYLES, strict=False)
    ]
    rows = [[f"{100 * a:g}%", *(wording.percent(record.risks.power(a)) for record in shown)] for a in SHOWN]
    curves = charts.figure(
        "tradeoff",
        "Trade-off curves",
        "The rate of missed detections of the best attack over its rate of false alarms, for each run. The higher a "
        "curve, the better the protection. The table below has the detection rates.",
        [*lines, charts.Line("guessing", (0.0, 1.0), (1.0, 0.0), charts.REFERENCE)],
        (charts.Axis("false alarms", 1.0), charts.Axis("missed detections", 1.0)),
        (["false alarms", *(f"{record.name}: detected, at most" for record in shown)], rows),
        note=None if len(shown) == len(records) else f"The first {len(shown)} runs with a guarantee are drawn.",
    )
    return tag("div", curves, _spending(shown), cls="pair")


def _spending(records: Sequence[RunRecord]) -> Html | None:
    spent = [(r.name, *spent_over_steps(r, r.training)) for r in records if r.training is not None]
    longest, largest = max(steps[-1] for _, steps, _ in spent), max(epsilons[-1] for *_, epsilons in spent)
    rows = [(name, f"{steps[-1]:,}", words.figure(epsilons[-1])) for name, steps, epsilons in spent]
    return charts.figure(
        "budget",
        "Epsilon over the steps of training",
        f"Epsilon rises to {', '.join(f'{figure} for {name}' for name, _, figure in rows)}.",
        [charts.Line(*each, style) for each, style in zip(spent, STYLES, strict=False)],
        (charts.Axis("releases", longest, whole=True), charts.Axis("epsilon", 1.08 * largest)),
        (("run", "releases", "epsilon at the end"), rows),
    )


def _settings(records: Sequence[RunRecord]) -> Html | None:
    """The settings in which the runs differ, and those that they share."""
    tables = [
        {**record.section("data"), **record.section("training"), **record.section("privacy")} for record in records
    ]
    names = list(dict.fromkeys(name for each in tables for name in each if not isinstance(each[name], (dict, list))))
    differing = [name for name in names if len({str(each.get(name)) for each in tables}) > 1]
    if not names:
        return None
    rows = [[name.replace("_", " "), *(words.setting(each.get(name, "-")) for each in tables)] for name in differing]
    head = ["setting", *(record.name for record in records)]
    same = ", ".join(
        f"{name.replace('_', ' ')} {words.setting(tables[0].get(name))}" for name in names if name not in differing
    )
    return markup(
        table("Settings that differ", head, rows) if rows else tag("p", "All recorded settings are equal."),
        tag("p", f"The same in all runs: {same}.", cls="note") if same else None,
    )
