"""The orchestration: one true ledger for counts and steps, interruptions, and runs that continue."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from clipwise import accounting
from clipwise.errors import ConfigurationError, PrivacyWarning
from clipwise.ledger.ledger import read
from clipwise.recipes.config import Choices
from clipwise.recipes.digits import DigitsEncoder, DigitsSource
from clipwise.recipes.finish import evaluate
from clipwise.recipes.interrupts import Interrupts
from clipwise.recipes.planning import plan_of
from clipwise.recipes.run_folder import RunFolder
from clipwise.recipes.train import begin, reopened, train
from clipwise.report import statement

CHOICES = Choices(path="digits", epsilon=3.0, epochs=2, batch_size=256, device="cpu")


@pytest.fixture(autouse=True)
def few_digits(monkeypatch):
    """Fewer rows, so that a run takes a moment."""
    monkeypatch.setattr(DigitsSource, "__len__", lambda self: 600)


@pytest.fixture
def counting(monkeypatch):
    """Digits whose preparation releases noised counts, and how often it was called."""
    calls = []

    def prepare(self, rows, counts):
        released = counts.release({"label": (np.zeros(len(rows), np.int64), 10)}, {})
        calls.append(int(released.histograms["label"][0]))
        return DigitsEncoder()

    monkeypatch.setattr(DigitsSource, "needs_counts", lambda self: True)
    monkeypatch.setattr(DigitsSource, "prepare", prepare)
    return calls


def started(path, choices=CHOICES):
    path.mkdir(exist_ok=True)
    return begin(plan_of(choices), RunFolder(path), "clipwise train digits")


class StopAt(Interrupts):
    """An interrupt after so many steps."""

    def __init__(self, step):
        super().__init__()
        self._step = step

    def watch(self, moment):
        self.requested |= moment.step == self._step


def interrupted(run, step):
    stop = StopAt(step)
    assert not train(run, stop.watch, stop)


def completed(run):
    assert train(run, lambda moment: None, Interrupts())


def weights(folder):
    return RunFolder(folder).load_model()


def test_counts_and_steps_have_one_figure_in_every_place(tmp_path, counting):
    run = started(tmp_path / "run")
    completed(run)
    found = read(run.folder.ledger)
    assert [(e.event.purpose, e.count) for e in found.history] == [("preparation", 1), ("", run.plan.steps)]
    assert len(counting) == 1 and found.clean and found.exact
    joint = accounting.epsilon_of(found.history, run.plan.delta)
    assert 0.98 * 3 < joint <= 3
    assert statement.of_ledger(run.folder.ledger).spent.epsilon == joint
    assert run.folder.progress()[-1]["epsilon"] == joint
    assert joint <= accounting.epsilon_of(run.plan.releases(), run.plan.delta)  # no strings were released


def test_an_interrupted_run_has_a_true_ledger_and_continues(tmp_path, counting):
    run = started(tmp_path / "run")
    interrupted(run, 2)
    assert [e.count for e in read(run.folder.ledger).history] == [1, 2]
    assert not run.folder.is_finished and run.folder.checkpoint.is_file() and run.folder.secrets.is_file()
    again = reopened(run.folder)
    completed(again)
    history = read(run.folder.ledger).history
    assert [e.count for e in history] == [1, run.plan.steps] and len({e.run for e in history}) == 1
    assert len(counting) == 1  # the counts were not released again
    assert accounting.epsilon_of(history, run.plan.delta) <= 3
    assert not run.folder.secrets.exists()


@pytest.mark.slow
def test_a_seeded_run_that_continued_equals_one_that_was_not_interrupted(tmp_path):
    choices = replace(CHOICES, seed=7, ema=0.9)
    completed(started(tmp_path / "whole", choices))
    run = started(tmp_path / "parts", choices)
    interrupted(run, 1)
    again = reopened(run.folder)
    interrupted(again, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)  # no fresh secret
        completed(reopened(run.folder))
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert read(tmp_path / "whole" / "ledger").position == read(tmp_path / "parts" / "ledger").position


def test_a_crash_between_counts_and_training_spends_the_counts_only(tmp_path, counting):
    run = started(tmp_path / "run")
    assert [(e.event.purpose, e.count) for e in read(run.folder.ledger).history] == [("preparation", 1)]
    completed(reopened(run.folder))
    assert len(counting) == 1
    assert accounting.epsilon_of(read(run.folder.ledger).history, run.plan.delta) <= 3


def test_a_crash_while_the_data_are_prepared_cannot_be_resumed(tmp_path, counting, monkeypatch):
    def fails(self, rows, counts):
        counts.release({"label": (np.zeros(len(rows), np.int64), 10)}, {})
        raise RuntimeError("power cut")

    monkeypatch.setattr(DigitsSource, "prepare", fails)
    with pytest.raises(RuntimeError):
        started(tmp_path / "run")
    assert read(tmp_path / "run" / "ledger").position == 1  # it is spent
    with pytest.raises(ConfigurationError, match="while the data were prepared"):
        reopened(RunFolder(tmp_path / "run"))


def test_a_killed_run_continues_from_its_last_checkpoint_within_the_budget(tmp_path):
    run = started(tmp_path / "run", replace(CHOICES, epochs=4))

    def killed(moment):
        if moment.step == 6:
            raise KeyboardInterrupt  # as a second Ctrl-C

    with pytest.raises(KeyboardInterrupt):
        train(run, killed, Interrupts())
    with pytest.warns(PrivacyWarning, match="fresh secret"):
        completed(reopened(run.folder))
    history = read(run.folder.ledger).history
    assert sum(e.count for e in history) == run.plan.steps
    assert accounting.epsilon_of(history, run.plan.delta) <= 3


def test_initial_weights_differ_between_runs_without_a_seed(tmp_path):
    before = torch.get_rng_state()
    for name in ("a", "b"):
        completed(started(tmp_path / name, replace(CHOICES, epochs=1)))
    a, b = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert not any(torch.equal(a[name], b[name]) for name in a)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seeded_run_claims_no_guarantee_from_its_counts_on(tmp_path, counting):
    run = started(tmp_path / "run", replace(CHOICES, seed=1))
    assert statement.of_ledger(run.folder.ledger).seeded
    started(tmp_path / "again", replace(CHOICES, seed=1))
    assert counting[0] == counting[1]


def test_the_metrics_hold_no_loss_and_no_batch_size(tmp_path):
    run = started(tmp_path / "run")
    completed(run)
    evaluate(run.plan, run.encoder, run.folder, None)
    lines = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    progress = {"kind", "epoch", "step", "steps", "epsilon", "accountant", "seconds"}
    released = {"kind", "name", "value", "low", "high", "rows", "group", "confidence", "step"}
    assert {frozenset(line) for line in lines} == {frozenset(progress), frozenset(released)}
    # Exact times of steps would show realised batch sizes.
    assert all(isinstance(line["seconds"], int) for line in lines if line["kind"] == "progress")


def test_the_held_out_rows_are_released_once(tmp_path):
    run = started(tmp_path / "run")
    completed(run)
    first = evaluate(run.plan, run.encoder, run.folder, None)
    assert len(first) == 1 and evaluate(run.plan, run.encoder, run.folder, None) == []
    found = read(run.folder.evaluation_ledger)
    assert found.position == 1 and found.header["dataset_size"] == 60
    assert accounting.epsilon_of(found.history, run.plan.delta) <= 3


def test_a_run_without_privacy_has_no_ledger(tmp_path):
    run = started(tmp_path / "run", replace(CHOICES, epsilon=math.inf, ema=0.9))
    completed(run)
    (figure,) = evaluate(run.plan, run.encoder, run.folder, None)
    assert not run.folder.ledger.exists() and not run.folder.evaluation_ledger.exists()
    assert run.folder.read_config()["privacy"]["epsilon"] == "none" and 0 <= figure.value <= 1


def test_other_data_are_refused(tmp_path, monkeypatch):
    run = started(tmp_path / "run")
    interrupted(run, 1)
    monkeypatch.setattr(DigitsSource, "__len__", lambda self: 500)
    with pytest.raises(ConfigurationError, match="500 rows"):
        reopened(run.folder)


def test_more_counts_than_planned_are_refused(tmp_path, counting, monkeypatch):
    plan = plan_of(CHOICES)
    weaker = replace(plan, counts=replace(plan.counts, noise_multiplier=plan.counts.noise_multiplier))
    monkeypatch.setattr("clipwise.recipes.train.NoisedCounts", lambda z, charge, **o: _Weak(z, charge))
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigurationError, match="more than was planned"):
        begin(weaker, RunFolder(tmp_path / "run"), "")
    assert not (tmp_path / "run").exists()  # nothing was released


class _Weak:
    def __init__(self, z, charge):
        self._z, self._charge = z, charge

    def release(self, histograms, strings):
        self._charge(replace(plan_of(CHOICES).counts, noise_multiplier=self._z / 2))
