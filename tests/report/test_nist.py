"""The checklist after NIST SP 800-226."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from clipwise.report.nist import checklist, nist
from clipwise.report.record import RunRecord


def test_every_layer_has_items_for_the_run_and_for_a_person(record: RunRecord) -> None:
    layers = checklist(record)
    assert len(layers) == 5 and next(iter(layers)) == "Guarantee" and "Collection" in list(layers)[-1]
    answers = [answer for items in layers.values() for answer in items.values()]
    assert any(answer is None for answer in answers) and any(answers)


def test_ticks(record: RunRecord) -> None:
    text = nist(record)
    assert "- [x] **What is the unit of privacy?** One record." in text
    assert "- [ ] **Does one record hold all data of one person?**" in text
    assert "- [ ] **Was the implementation attacked?**" in text
    failed = nist(replace(record, audit={"ok": False}))
    assert "**Was the implementation attacked?** Yes; the audit FAILED." in failed


def test_a_large_delta_is_criticised(record: RunRecord) -> None:
    assert record.training is not None
    loose = replace(record, training=replace(record.training, spent=replace(record.training.spent, delta=0.05)))
    (answer,) = [answer for question, answer in checklist(loose)["Guarantee"].items() if "delta" in question]
    assert answer and answer.startswith("No:")


def test_a_run_without_guarantee(not_private: Path) -> None:
    text = nist(RunRecord.read(not_private))
    assert "**No privacy guarantee.**" in text.split("##")[0]
