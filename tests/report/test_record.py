"""What is read about a run, and when it has no guarantee."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from clipwise import accounting
from clipwise.errors import ConfigurationError
from clipwise.privacy import Unit
from clipwise.report import wording
from clipwise.report.record import RunRecord
from clipwise.report.statement import of_ledger
from tests.cli.calls import EVENT, write_ledger
from tests.report.run_folders import charge_evaluation, with_audit


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def test_the_run_costs_the_larger_of_its_ledgers(run: Path, record: RunRecord) -> None:
    training, evaluation = (of_ledger(run / name, 1e-5) for name in ("ledger", "evaluation.ledger"))
    assert training.spent.epsilon > evaluation.spent.epsilon > 0
    assert record.epsilon == training.spent.epsilon and record.delta == 1e-5
    assert record.no_guarantee is None and record.closed


def test_a_costly_evaluation_is_the_cost_of_the_run(copy: Path) -> None:
    charge_evaluation_anew(copy, noise_multiplier=0.3)
    record = RunRecord.read(copy)
    assert record.training and record.evaluation
    assert record.epsilon == record.evaluation.spent.epsilon > record.training.spent.epsilon
    curve = accounting.tradeoff_of(record.evaluation.history)
    assert record.risks.power(0.01) == curve.power(0.01)
    assert record.risks.mu == curve.mu(1e-5)


def charge_evaluation_anew(folder: Path, **options: float) -> None:
    (folder / "evaluation.ledger").unlink()
    charge_evaluation(folder, **options)


@pytest.mark.parametrize("alpha", [0.0, 0.001, 0.01, 0.1, 0.5, 1.0])
def test_mu_bounds_the_curve_within_delta(record: RunRecord, alpha: float) -> None:
    gaussian = accounting.Tradeoff.gaussian(record.risks.mu)
    assert record.risks.missed(alpha) >= gaussian(alpha) - record.delta - 1e-12
    smaller = accounting.Tradeoff.gaussian(0.9 * record.risks.mu)
    assert any(record.risks.missed(a / 100) < smaller(a / 100) - record.delta for a in range(100))


def test_mu_is_not_the_central_limit() -> None:
    """The approximation of the central limit is far below the truth for this run."""
    event = replace(EVENT, noise_multiplier=0.7, sample_rate=1024 / 60000)
    curve = accounting.tradeoff(noise_multiplier=0.7, sample_rate=event.sample_rate, steps=59)
    limit = accounting.central_limit(noise_multiplier=0.7, sample_rate=event.sample_rate, steps=59)
    assert curve.mu(1e-5) > 1.5 * limit.mu


def test_a_posterior_never_falls_below_the_prior(record: RunRecord) -> None:
    for prior in (0.01, 0.1, 0.5):
        loose, tight = (record.risks.posterior(prior, alpha) for alpha in (0.01, 0.001))
        assert prior < loose <= tight < 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "ledger").unlink(), "ledger of this run is missing"),
        (lambda folder: (folder / "evaluation.ledger").unlink(), "the ledger of that release is missing"),
        (lambda folder: charge_evaluation_anew(folder, noise_multiplier=0.0), "no noise"),
    ],
)
def test_a_run_that_cannot_be_counted_has_no_guarantee(copy: Path, change: object, words: str) -> None:
    change(copy)  # type: ignore[operator]
    record = RunRecord.read(copy)
    assert words in (record.no_guarantee or "")


def test_runs_without_guarantee(seeded: Path, not_private: Path, record: RunRecord) -> None:
    assert "given seed" in (RunRecord.read(seeded).no_guarantee or "")
    found = RunRecord.read(not_private)
    assert "without differential privacy" in (found.no_guarantee or "") and math.isinf(found.epsilon)
    assert record.training is not None
    changed = replace(record, training=replace(record.training, weights=wording.NOT_VERIFIED))
    assert "other than its releases" in (changed.no_guarantee or "")


def test_ledgers_must_protect_the_same_unit(copy: Path) -> None:
    (copy / "evaluation.ledger").unlink()
    charge_evaluation(copy, unit=Unit.USER)
    with pytest.raises(ConfigurationError, match="different adjacencies or units"):
        _ = RunRecord.read(copy).risks


def test_the_numbers_of_rows(record: RunRecord, not_private: Path) -> None:
    assert (record.dataset_size, record.training_rows, record.held_out_rows) == (50, 40, 10)
    assert RunRecord.read(not_private).training_rows == 40  # from the configuration


def test_the_last_figure_of_each_kind_counts(copy: Path) -> None:
    line = {"kind": "released", "name": "accuracy", "value": 0.5, "rows": "held-out", "group": None}
    with (copy / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n" + '{"kind": "rel')  # cut by a crash
    assert [found["value"] for found in RunRecord.read(copy).released] == [0.5, 0.8]


def test_a_ledger_alone(tmp_path: Path) -> None:
    record = RunRecord.read(write_ledger(tmp_path / "ledger", 9))
    assert record.name == tmp_path.name and record.config == {} and record.training is not None
    assert RunRecord.read(write_ledger(tmp_path / "my.ledger", 3)).name == "my.ledger"


def test_a_folder_with_a_ledger_alone(tmp_path: Path) -> None:
    write_ledger(tmp_path / "ledger", 9)
    assert RunRecord.read(tmp_path).no_guarantee is None


def test_files_that_cannot_be_read(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="not the folder of a run"):
        RunRecord.read(tmp_path)
    (copy / "metrics.jsonl").write_text("{}\nno json\n{}\n")
    with pytest.raises(ConfigurationError, match="line 2, is not JSON"):
        RunRecord.read(copy)
    (copy / "config.toml").write_text("a =")
    with pytest.raises(ConfigurationError, match=r"config\.toml cannot be read"):
        RunRecord.read(copy)


def test_an_audit_belongs_to_its_run(copy: Path, record: RunRecord) -> None:
    assert record.training is not None
    with_audit(copy, record.training.run)
    assert (RunRecord.read(copy).audit or {})["ok"] is True
    with_audit(copy, "0" * 32)
    with pytest.raises(ConfigurationError, match="not that of the ledger"):
        RunRecord.read(copy)
