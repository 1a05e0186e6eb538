"""Runs that prepare their data: one PLD figure, one budget, and a true ledger after a crash."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, islice, repeat
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clipwise import accounting
from clipwise.clipping import PerExample
from clipwise.engine.make_private import make_private
from clipwise.engine.private import Private
from clipwise.errors import BudgetExhausted, ConfigurationError
from clipwise.ledger.ledger import FileLedger, read
from clipwise.ledger.planned_run import plan_run
from clipwise.privacy import Adjacency, Entry, Event, Sampling, Unit
from clipwise.report import statement

EPSILON, DELTA, STEPS, ROWS, BATCH = 2.0, 1e-5, 6, 40, 10
COUNTS = Event(Sampling.FULL, Adjacency.ZERO_OUT, Unit.RECORD, 5.0, 1.0, purpose="preparation")
STEP = Event(Sampling.POISSON, Adjacency.ZERO_OUT, Unit.RECORD, 1.0, BATCH / ROWS)


def noise() -> float:
    return accounting.smallest_noise(STEP, STEPS, EPSILON, DELTA, beside=[Entry(COUNTS, 1)])


def prepared(path: Path, counts: int = 1) -> FileLedger:
    ledger = FileLedger(path, header={"dataset_size": ROWS})
    tag = plan_run(ledger, replace(STEP, noise_multiplier=noise()), STEPS, EPSILON, DELTA)
    for _ in range(counts):
        ledger.charge(COUNTS, tag)
    return ledger


def private_on(ledger: FileLedger, **changes: object) -> tuple[Private, nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    data = TensorDataset(torch.randn(ROWS, 3), torch.randint(2, (ROWS,)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    settings = {"batch_size": BATCH, "steps": STEPS, "epsilon": EPSILON, "delta": DELTA} | changes
    return make_private(model, optimizer, data, clipping=PerExample(), ledger=ledger, **settings), model  # type: ignore[arg-type]


def train(private: Private, model: nn.Module, steps: int) -> None:
    for x, y in islice(chain.from_iterable(repeat(private.loader)), steps):
        private.step(F.cross_entropy(model(x), y, reduction="none") if len(x) else None)


def joint() -> float:
    return accounting.epsilon_of([Entry(COUNTS, 1), Entry(replace(STEP, noise_multiplier=noise()), STEPS)], DELTA)


def test_counts_and_steps_are_one_pld_figure_everywhere(tmp_path: Path) -> None:
    private, model = private_on(prepared(tmp_path / "ledger"))
    with private:
        train(private, model, STEPS)
        spent = private.spent()
        made = private.statement()
    assert spent.accountant == "pld" and spent.assumption == ""
    assert 0.98 * EPSILON < spent.epsilon <= EPSILON
    assert spent.epsilon == pytest.approx(joint(), rel=1e-6)
    found = statement.of_ledger(tmp_path / "ledger")
    assert found.spent.epsilon == made.spent.epsilon == spent.epsilon
    assert "noised counts" in str(found) and "fixed before the first release" in str(found)
    assert found.budget == EPSILON and found.exact and found.probed


def test_the_noise_allows_for_the_counts() -> None:
    assert noise() > accounting.smallest_noise(STEP, STEPS, EPSILON, DELTA)


def test_the_budget_counts_the_preparation(tmp_path: Path) -> None:
    private, model = private_on(prepared(tmp_path / "ledger"))
    with pytest.raises(BudgetExhausted), private:
        train(private, model, 3 * STEPS)
    assert statement.of_ledger(tmp_path / "ledger").spent.epsilon <= EPSILON


def test_a_crash_after_the_counts_leaves_a_ledger_that_training_continues(tmp_path: Path) -> None:
    ledger = prepared(tmp_path / "ledger")
    ledger._file.close()  # as after a crash: no clean end
    found = read(tmp_path / "ledger")
    assert [(entry.event, entry.count) for entry in found.history] == [(COUNTS, 1)]
    private, model = private_on(FileLedger(tmp_path / "ledger"))
    with private:
        train(private, model, STEPS)
    entries = read(tmp_path / "ledger").history
    assert [entry.count for entry in entries] == [1, STEPS] and len({entry.run for entry in entries}) == 1


def test_a_checkpoint_continues_under_the_same_tag(tmp_path: Path) -> None:
    private, model = private_on(prepared(tmp_path / "ledger"))
    with private:
        train(private, model, 2)
        state, weights = private.state_dict(), model.state_dict()
    private, model = private_on(FileLedger(tmp_path / "ledger"))
    model.load_state_dict(weights)
    private.load_state_dict(state)
    with private:
        train(private, model, STEPS - 2)
        assert private.spent().epsilon == pytest.approx(joint(), rel=1e-6)
    assert len({entry.run for entry in read(tmp_path / "ledger").history}) == 1


@pytest.mark.parametrize("change", [{"epsilon": 3.0}, {"steps": STEPS - 1}, {"batch_size": BATCH + 1}, {"delta": 1e-6}])
def test_another_plan_is_refused(tmp_path: Path, change: dict[str, float]) -> None:
    with (
        prepared(tmp_path / "ledger") as ledger,
        pytest.raises(ConfigurationError, match=r"fixed before|the same delta"),
    ):
        private_on(ledger, **change)


def test_counts_that_were_released_twice_are_refused(tmp_path: Path) -> None:
    with prepared(tmp_path / "ledger", counts=2) as ledger, pytest.raises(ConfigurationError, match="more often"):
        private_on(ledger)


@pytest.mark.slow
def test_another_run_on_the_ledger_is_accounted_by_the_filter(tmp_path: Path) -> None:
    private, model = private_on(prepared(tmp_path / "ledger"))
    with private:
        train(private, model, STEPS)
    private, model = private_on(FileLedger(tmp_path / "ledger", join=True), epsilon=6.0)
    with private:
        train(private, model, 1)
        assert private.spent().accountant == "renyi-filter"


def test_a_run_is_planned_before_its_first_release(tmp_path: Path) -> None:
    with prepared(tmp_path / "ledger") as ledger, pytest.raises(ConfigurationError, match="before its first release"):
        plan_run(ledger, STEP, STEPS, EPSILON, DELTA)


def test_noise_that_leaves_nothing_for_the_steps_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="leaves nothing"):
        accounting.smallest_noise(STEP, STEPS, 0.5, DELTA, beside=[Entry(replace(COUNTS, noise_multiplier=1.0), 1)])
