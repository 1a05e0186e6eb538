"""A checklist after NIST SP 800-226 (Guidelines for Evaluating Differential Privacy Guarantees), in our own words.

It follows the layers of that publication from the guarantee at the top to the collection of the data at the base. An
item is answered from the record of the run, or left to a person.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from clipwise.report import plain_words as words
from clipwise.report import wording
from clipwise.report.record import RunRecord
from clipwise.report.run_statement import assumptions


@dataclass(frozen=True)
class Item:
    """A question, and its answer from the run; None if a person must answer it."""

    layer: str
    question: str
    answer: str | None = None


def checklist(record: RunRecord) -> list[Item]:
    """All items for a run."""
    record.require_one_unit()
    holds = record.no_guarantee is None
    items = list(_guarantee(record, holds))
    items += _algorithm(record) if record.training is not None else []
    return [*items, *_utility(record), *_operation(record), *_data()]


def nist(record: RunRecord) -> str:
    """The checklist as Markdown: answered items are ticked."""
    lines = [f"# NIST SP 800-226 checklist: {record.name}", ""]
    if record.no_guarantee is not None:
        lines += [f"**{words.NOT_PRIVATE_TITLE}.** {record.no_guarantee}", ""]
    lines += ["Ticked items are answered from the record of the run. The others need an answer by a person.", ""]
    layer = ""
    for item in checklist(record):
        if item.layer != layer:
            layer = item.layer
            lines += [f"## {layer}", ""] if lines[-1] == "" else ["", f"## {layer}", ""]
        answer = "to be answered by a person" if item.answer is None else item.answer
        lines += [f"- [{' ' if item.answer is None else 'x'}] **{item.question}** {answer}"]
    return "\n".join(lines).rstrip() + "\n"


def _guarantee(record: RunRecord, holds: bool) -> Iterator[Item]:
    layer = "Guarantee"
    yield Item(
        layer,
        "Which definition of privacy, with which parameters?",
        words.formal(record) if holds else record.no_guarantee,
    )
    if not holds:
        return
    s = record.ledgers[0].spent
    yield Item(layer, "What does this mean for an attacker?", words.detection(record))
    yield Item(layer, "What is the unit of privacy?", f"One {s.unit}.")
    yield Item(layer, f"Does one {s.unit} hold all data of one person?")
    yield Item(layer, "Which data sets are neighbours?", f"{wording.neighbours(s.adjacency, s.unit)}.".capitalize())
    yield Item(layer, "Is delta well below 1 / (number of units)?", _delta(record))
    yield Item(layer, "How do several releases compose?", words.composition(record))
    yield Item(layer, "Are all other releases from the same data counted together with this run?")
    yield Item(layer, "Is this epsilon acceptable for these data and this use?")


def _delta(record: RunRecord) -> str | None:
    size = record.training_rows
    if size is None:
        return None
    product = record.delta * size
    relation = f"delta is {words.small(record.delta)}, which is {product:.2g} / (number of training rows)"
    return f"Yes: {relation}." if product <= 0.5 else f"No: {relation}. Use a smaller delta."


def _algorithm(record: RunRecord) -> list[Item]:
    layer, training = "Algorithm", record.training
    assert training is not None
    lines: dict[str, str] = defaultdict(lambda: "not applicable")
    for name, text in training.lines():
        lines[name] = f"{lines[name]}; {text}" if name in lines else text
    probed = {True: "yes, on the first batches", False: "no", None: "not recorded"}[training.probed]
    audit = None
    if record.audit is not None:
        audit = "Yes; no attack exceeded the claim." if record.audit.get("ok") is True else "Yes; the audit FAILED."
    return [
        Item(layer, "Which mechanism?", f"{lines['releases']}."),
        Item(layer, "Which sensitivity, and how is it enforced?", f"{lines['sensitivity']}; gradients are clipped."),
        Item(layer, "How is the noise generated?", f"{lines['noise']}."),
        Item(
            layer,
            "Is it protected against floating-point attacks?",
            "Yes: the noise is rounded exactly to the grid of the sum."
            if training.noise == "secure"
            else "The tails of the noise are exact. The low bits of floating-point numbers are not protected.",
        ),
        Item(layer, "Is the accounting an upper bound?", f"{lines['accountant']}."),
        Item(layer, "Is every output covered?", f"{lines['released']}. Weights: {lines['weights']}."),
        Item(layer, "Were losses examined for examples that depend on each other?", f"{probed}.".capitalize()),
        Item(layer, "Was the implementation attacked?", audit),
        Item(layer, "What is assumed?", f"{'; '.join(assumptions(record))}."),
        Item(layer, "Was tuning counted?", f"{lines['tuning']}."),
    ]


def _utility(record: RunRecord) -> list[Item]:
    layer = "Utility and bias"
    figures = [words.result(record, line) for line in record.released]
    groups = any(line.get("group") is not None for line in record.released)
    return [
        Item(
            layer, "How accurate is the model, with which uncertainty?", f"{'; '.join(figures)}." if figures else None
        ),
        Item(layer, "Is accuracy known for each group of people?", "Yes; see above." if groups else None),
        Item(layer, "Does noise or clipping harm small groups more than others, and is that acceptable?"),
        Item(layer, "Is the model good enough for its use at this epsilon?"),
    ]


def _operation(record: RunRecord) -> list[Item]:
    layer = "Trust, security and access"
    return [
        Item(layer, "Which trust model?", f"{wording.SETTING}.".capitalize()),
        Item(layer, "What is not protected?", f"{'; '.join(words.not_covered(record))}."),
        Item(layer, "Who can read the private data, the noise key and the checkpoints, and how is that enforced?"),
        Item(layer, "Are checkpoints, logs and unreleased files of the run kept from the public?"),
        Item(layer, "Can others trigger runs and see their duration or failures?"),
        Item(layer, "Who decides on further runs, and where are their ledgers kept?"),
    ]


def _data() -> list[Item]:
    layer = "Collection of the data"
    return [
        Item(layer, "Is the collection lawful, necessary and known to the people in the data?"),
        Item(layer, "Are the data protected where they are stored, and deleted when they are no longer needed?"),
        Item(layer, "Are the data representative for the use of the model?"),
    ]
