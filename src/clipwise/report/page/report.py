"""The report of one run."""

from __future__ import annotations

from clipwise.report import plain_words as words
from clipwise.report.page import guarantee, run
from clipwise.report.page.document import Section, document
from clipwise.report.page.html import Html, markup, tag
from clipwise.report.record import RunRecord
from clipwise.report.run_statement import assumptions


def report(record: RunRecord) -> str:
    """The page of a run."""
    record.require_one_unit()
    holds = record.no_guarantee is None
    head = [
        guarantee.warning(record),
        tag("p", "Privacy report", cls="kind"),
        tag("h1", record.name),
        tag("p", words.guarantee(record), cls="lead") if holds else None,
        tag("p", words.formal(record), cls="kind") if holds else None,
        guarantee.state(record),
        guarantee.headline(record),
    ]
    sections = [
        Section("attacker", "How much an attacker learns", guarantee.attacker(record) if holds else None),
        Section("data", "What was trained on what", run.data_and_model(record) if record.config else None),
        Section("accuracy", "Accuracy as released", run.accuracy(record) if record.config else None),
        Section("budget", "How the budget was spent", _budget(record) if holds else None),
        Section("limits", "What is not protected", guarantee.protected(record) if holds else None),
        Section(
            "method",
            "How the guarantee was obtained",
            guarantee.mechanism(record, assumptions(record)) if holds else None,
        ),
        Section("audit", "Audit", run.audit(record) if record.training else None),
        Section("configuration", "Configuration and versions", run.configuration(record)),
    ]
    return document(f"{record.name}: privacy report", head, sections)


def _budget(record: RunRecord) -> Html:
    training = record.training
    chart = guarantee.budget_chart(record, training) if training is not None else None
    return markup(guarantee.ledgers(record), tag("div", chart, guarantee.tradeoff_chart(record), cls="pair"))
