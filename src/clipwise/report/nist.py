"""A checklist after NIST SP 800-226 (Guidelines for Evaluating Differential Privacy Guarantees), in our own words.

It follows the layers of that publication from the guarantee at the top to the collection of the data at the base. An
item is answered from the record of the run, or left to a person.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TypeAlias

from clipwise.report import plain_words as words
from clipwise.report import wording
from clipwise.report.record import RunRecord
from clipwise.report.run_statement import assumptions
from clipwise.report.statement import Statement

Items: TypeAlias = "dict[str, str | None]"  # questions, and their answers from the run; None if a person must answer


def checklist(record: RunRecord) -> dict[str, Items]:
    """The items of each layer for a run."""
    record.require_one_unit()
    layers = {"Guarantee": _guarantee(record)}
    if record.training is not None:
        layers["Algorithm"] = _algorithm(record, record.training)
    return layers | {
        "Utility and bias": _utility(record),
        "Trust, security and access": {
            "Which trust model?": f"{wording.SETTING}.".capitalize(),
            "What is not protected?": f"{'; '.join(words.not_covered(record))}.",
            "Who can read the private data, the noise key and the checkpoints, and how is that enforced?": None,
            "Are checkpoints, logs and unreleased files of the run kept from the public?": None,
            "Can others trigger runs and see their duration or failures?": None,
            "Who decides on further runs, and where are their ledgers kept?": None,
        },
        "Collection of the data": {
            "Is the collection lawful, necessary and known to the people in the data?": None,
            "Are the data protected where they are stored, and deleted when they are no longer needed?": None,
            "Are the data representative for the use of the model?": None,
        },
    }


def nist(record: RunRecord) -> str:
    """The checklist as Markdown: answered items are ticked."""
    lines = [f"# NIST SP 800-226 checklist: {record.name}", ""]
    if record.no_guarantee is not None:
        lines += [f"**{words.NOT_PRIVATE_TITLE}.** {record.no_guarantee}", ""]
    lines += ["Ticked items are answered from the record of the run. The others need an answer by a person.", ""]
    for layer, items in checklist(record).items():
        lines += [f"## {layer}", ""]
        for question, answer in items.items():
            tick = " " if answer is None else "x"
            lines.append(f"- [{tick}] **{question}** {'to be answered by a person' if answer is None else answer}")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _guarantee(record: RunRecord) -> Items:
    which = "Which definition of privacy, with which parameters?"
    if record.no_guarantee is not None:
        return {which: record.no_guarantee}
    s = record.ledgers[0].spent
    return {
        which: words.formal(record),
        "What does this mean for an attacker?": words.detection(record),
        "What is the unit of privacy?": f"One {s.unit}.",
        f"Does one {s.unit} hold all data of one person?": None,
        "Which data sets are neighbours?": f"{wording.neighbours(s.adjacency, s.unit)}.".capitalize(),
        "Is delta well below 1 / (number of units)?": _delta(record),
        "How do several releases compose?": words.composition(record),
        "Are all other releases from the same data counted together with this run?": None,
        "Is this epsilon acceptable for these data and this use?": None,
    }


def _delta(record: RunRecord) -> str | None:
    size = record.training_rows
    if size is None:
        return None
    product = record.delta * size
    relation = f"delta is {wording.small(record.delta)}, which is {product:.2g} / (number of training rows)"
    return f"Yes: {relation}." if product <= 0.5 else f"No: {relation}. Use a smaller delta."


def _algorithm(record: RunRecord, training: Statement) -> Items:
    lines: dict[str, str] = defaultdict(lambda: "not applicable")
    for name, text in training.lines():
        lines[name] = f"{lines[name]}; {text}" if name in lines else text
    probed = {True: "yes, on the first batches", False: "no", None: "not recorded"}[training.probed]
    audit = None
    if record.audit is not None:
        audit = "Yes; no attack exceeded the claim." if record.audit.get("ok") is True else "Yes; the audit FAILED."
    return {
        "Which mechanism?": f"{lines['releases']}.",
        "Which sensitivity, and how is it enforced?": f"{lines['sensitivity']}; gradients are clipped.",
        "How is the noise generated?": f"{lines['noise']}.",
        "Is it protected against floating-point attacks?": "Yes: the noise is rounded exactly to the grid of the sum."
        if training.noise == "secure"
        else "The tails of the noise are exact. The low bits of floating-point numbers are not protected.",
        "Is the accounting an upper bound?": f"{lines['accountant']}.",
        "Is every output covered?": f"{lines['released']}. Weights: {lines['weights']}.",
        "Were losses examined for examples that depend on each other?": f"{probed}.".capitalize(),
        "Was the implementation attacked?": audit,
        "What is assumed?": f"{'; '.join(assumptions(record))}.",
        "Was tuning counted?": f"{lines['tuning']}.",
    }


def _utility(record: RunRecord) -> Items:
    figures = [words.result(record, line) for line in record.released]
    groups = any(line.get("group") is not None for line in record.released)
    return {
        "How accurate is the model, with which uncertainty?": f"{'; '.join(figures)}." if figures else None,
        "Is accuracy known for each group of people?": "Yes; see above." if groups else None,
        "Does noise or clipping harm small groups more than others, and is that acceptable?": None,
        "Is the model good enough for its use at this epsilon?": None,
    }
