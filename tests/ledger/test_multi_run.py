"""Several runs on one ledger: each has its own count, and the guarantee holds for all of them together."""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from clipwise import FileLedger, MemoryLedger, Private, accounting
from clipwise.accounting import gaussian
from clipwise.engine import step
from clipwise.errors import BudgetExhausted, ConfigurationError, LedgerError, PrivacyWarning
from clipwise.ledger import ledger
from clipwise.ledger.file_format import LedgerState
from clipwise.privacy import Adjacency, Entry, Event, Sampling, Unit
from clipwise.report.statement import of_ledger
from tests.runs import network, parameters, private_run, same, train

EPSILON, DELTA = 2.0, 1e-5
BUDGET: dict[str, Any] = {"epsilon": EPSILON, "delta": DELTA, "epochs": 2}  # 10 steps
FIXED = "if all runs were fixed before the first release"

pytestmark = pytest.mark.usefixtures("one_thread")

Next = Callable[..., tuple[nn.Module, Private]]


@pytest.fixture(params=["memory", "file", "join"])
def another(request: pytest.FixtureRequest, tmp_path: Path) -> Next:
    """Make another run on the same ledger: an object that is shared, or a file that each run joins."""
    shared = {"memory": MemoryLedger, "file": lambda: FileLedger(tmp_path / "ledger"), "join": lambda: None}
    open_ledger = shared[request.param]()
    before: list[Private] = []

    def make(**options: Any) -> tuple[nn.Module, Private]:
        if before and request.param == "join":
            before[-1].close()
        given = FileLedger(tmp_path / "ledger", join=True) if open_ledger is None else open_ledger
        model, private = private_run(ledger=given, **options)
        before.append(private)
        return model, private

    return make


def until_exhausted(model: nn.Module, private: Private) -> int:
    """How many steps a run makes before it is refused."""
    made = 0
    with pytest.raises(BudgetExhausted, match="epsilon=2 at delta=1e-05"):
        while made < 100:
            train(model, private, 1)
            made += 1
    return made


# What is counted


def test_shuffled_epochs_of_two_runs_are_not_merged() -> None:
    """Two steps of an epoch by each of two runs, in turns: a record may have been in both."""
    open_ledger = MemoryLedger()
    runs = [private_run(ledger=open_ledger, sampling="shuffled", noise_multiplier=1.5) for _ in range(2)]
    for _ in range(2):
        for model, private in runs:
            train(model, private, 1)
    assert [entry.count for entry in open_ledger.history()] == [2, 2]
    two_passes = gaussian.epsilon(math.sqrt(2) / 1.5, DELTA)
    assert runs[0][1].spent(DELTA, "pld").epsilon >= 0.999 * two_passes


def test_a_run_continues_in_its_own_entry(tmp_path: Path) -> None:
    open_ledger = FileLedger(tmp_path / "ledger")
    (one, first), (other, second) = (private_run(ledger=open_ledger, sampling="shuffled") for _ in range(2))
    for _ in range(12):
        train(one, first, 1)
        train(other, second, 1)
    first.close()
    train(other, second, 1)  # the ledger is open as long as a run uses it
    second.close()
    found = ledger.read(tmp_path / "ledger")
    assert [entry.count for entry in found.history] == [12, 13] and found.clean and found.exact
    assert len({entry.run for entry in found.history}) == 2
    with pytest.raises(LedgerError, match="closed"):
        private_run(ledger=open_ledger)


def test_a_state_is_loaded_beside_the_run_that_it_is_of() -> None:
    """Both continue, so they must not count as one."""
    open_ledger = MemoryLedger()
    model, private = private_run(ledger=open_ledger, sampling="shuffled")
    train(model, private, 2)
    _, twin = private_run(model, ledger=open_ledger, sampling="shuffled")
    with pytest.warns(PrivacyWarning, match="fresh secret"):
        twin.load_state_dict(private.state_dict())
    model.zero_grad()
    train(model, twin, 2)
    assert [entry.count for entry in open_ledger.history()] == [2, 2]
    assert len({entry.run for entry in open_ledger.history()}) == 2


def test_averages_do_not_follow_the_releases_of_others() -> None:
    open_ledger = MemoryLedger()
    model, private = private_run(ledger=open_ledger, ema=0.5)
    other = private_run(ledger=open_ledger)
    train(model, private, 3)
    before = private.ema.state_dict()
    train(*other, 2)
    after = private.ema.state_dict()
    assert str(before) == str(after)


# The budget


@pytest.mark.slow
def test_two_runs_share_one_budget(another: Next) -> None:
    model, private = another(**BUDGET)
    train(model, private, 5)
    model, private = another(**BUDGET)
    train(model, private, 10)  # it was calibrated for them
    until_exhausted(model, private)
    spent = private.spent()
    assert spent.accountant == "renyi-filter" and 0.95 * EPSILON < spent.epsilon <= EPSILON
    assert accounting.epsilon_of(private._context.ledger.history(), DELTA) <= EPSILON


def test_the_budget_counts_what_another_run_charges_meanwhile() -> None:
    open_ledger = MemoryLedger()
    model, private = private_run(ledger=open_ledger, **BUDGET)
    other = private_run(ledger=open_ledger, noise_multiplier=4.0)
    train(model, private, 3)
    train(*other, 2)
    assert until_exhausted(model, private) < 7
    assert private.spent().epsilon <= EPSILON
    train(*other, 9)  # has no budget, and takes what is left
    with pytest.raises(BudgetExhausted, match="other runs have charged"):
        train(model, private, 1)


def test_a_charge_is_checked_in_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run may charge after a step has begun, and before it is released."""
    open_ledger = MemoryLedger()
    model, private = private_run(ledger=open_ledger, **BUDGET)
    other = private_run(ledger=open_ledger, noise_multiplier=0.5)
    train(model, private, 1)
    gather = step.gather

    def meanwhile(context: Any, *arguments: Any) -> bool:
        if context is private._context:
            train(*other, 3)
        return gather(context, *arguments)

    monkeypatch.setattr(step, "gather", meanwhile)
    before = parameters(model)
    with pytest.raises(BudgetExhausted):
        train(model, private, 1)
    assert same(before, parameters(model)) and [e.count for e in open_ledger.history()] == [1, 3]


def test_threads_cannot_pass_the_budget_together() -> None:
    open_ledger = MemoryLedger()
    runs = [private_run(ledger=open_ledger, **BUDGET) for _ in range(3)]

    def exhaust(model: nn.Module, private: Private) -> None:
        with contextlib.suppress(BudgetExhausted):
            train(model, private, 20)

    workers = [threading.Thread(target=exhaust, args=run) for run in runs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert 0.8 * EPSILON < runs[0][1].spent().epsilon <= EPSILON


@pytest.mark.slow
def test_a_budget_that_is_used_up_is_refused_at_once(another: Next) -> None:
    model, private = another(**BUDGET)
    until_exhausted(model, private)
    words = r"used up: the ledger already holds 1\d releases of 1 run.*epsilon is the budget of the whole ledger"
    with pytest.raises(ConfigurationError, match=words):
        another(**BUDGET)
    model, private = another(**{**BUDGET, "epsilon": 4.0})
    train(model, private, 10)
    assert EPSILON < private.spent().epsilon <= 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampling": "fixed-size"}, "zero-out of one record.*replace-one of one record"),
        ({"sampling": "fixed-size", "epsilon": None}, "zero-out of one record.*replace-one of one record"),
        ({"delta": 1e-6}, "the same delta"),
    ],
)
def test_runs_that_do_not_go_together(another: Next, changes: dict[str, Any], words: str) -> None:
    train(*another(**BUDGET), 1)
    options = {**BUDGET, **changes}
    if options["epsilon"] is None:
        options = {"noise_multiplier": 1.0, "sampling": options["sampling"]}
    with pytest.raises(ConfigurationError, match=words):
        another(**options)


def test_reservations_do_not_pass_the_budget(tmp_path: Path) -> None:
    """A crash spends all that is reserved."""
    model, private = private_run(ledger=tmp_path / "ledger", **BUDGET)
    train(model, private, 8)  # 1 + 2 + 4, and then 4 would be one too many
    assert ledger.read(tmp_path / "ledger").position <= 10
    assert accounting.epsilon_of(ledger.read(tmp_path / "ledger").history, DELTA) <= EPSILON


# The order of the filter


EVENT = Event(Sampling.POISSON, Adjacency.ZERO_OUT, Unit.RECORD, 1.0, 0.01)


def test_the_order_follows_from_the_first_plan(tmp_path: Path) -> None:
    with private_run(ledger=tmp_path / "ledger", **BUDGET)[1] as private:
        train(private._context.model, private, 1)
        event = private._context.event
    found = ledger.read(tmp_path / "ledger")
    assert found.plan == {"budget": EPSILON, "delta": DELTA, "planned": 10, "late": False}
    options = {"noise_multiplier": 2.0, "epochs": 50, "delta": 1e-7}
    with private_run(ledger=FileLedger(tmp_path / "ledger", join=True), **options)[1] as private:
        train(private._context.model, private, 2)
        spent = private.spent(DELTA)
    again = ledger.read(tmp_path / "ledger")
    assert again.plan == found.plan  # whatever came later
    order = accounting.Filter(EPSILON, DELTA, plan=[Entry(event, 10)]).order
    assert spent.epsilon == accounting.filter.epsilon_at(order, again.history, DELTA)


def test_a_plan_goes_along_with_a_checkpoint() -> None:
    model, private = private_run(**BUDGET)
    train(model, private, 3)
    _, other = private_run(model, ledger=MemoryLedger(), noise_multiplier=3.0)
    with pytest.warns(PrivacyWarning, match="fresh secret"):
        other.load_state_dict(private.state_dict())
    model.zero_grad()
    train(model, other, 1)
    plan = {"budget": EPSILON, "delta": DELTA, "planned": 10, "late": False}
    assert other._context.ledger.plan == private._context.ledger.plan == plan
    assert [entry.run for entry in other._context.ledger.history()] == [private._context.tag, other._context.tag]


@pytest.mark.slow
def test_without_a_plan_the_first_budget_decides(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with private_run(ledger=path, noise_multiplier=2.0)[1] as private:
        train(private._context.model, private, 3)
    assert ledger.read(path).plan is None
    model, private = private_run(ledger=FileLedger(path, join=True), **BUDGET)
    train(model, private, 10)
    order = accounting.filter.order_for_budget(EPSILON, DELTA)
    spent = accounting.filter.epsilon_at(order, private._context.ledger.history(), DELTA)
    assert private.spent().epsilon == spent and 0.95 * EPSILON < spent <= EPSILON
    private.close()
    assert of_ledger(path).spent.epsilon == spent


# Resume


def test_a_joined_run_continues_bit_for_bit(tmp_path: Path) -> None:
    """Its noise was calibrated after the earlier releases. On resume its own releases do not change that."""
    path = tmp_path / "ledger"
    with private_run(ledger=path, **BUDGET)[1] as private:
        train(private._context.model, private, 5)
    model, private = private_run(ledger=FileLedger(path, join=True), **BUDGET)
    z = private.noise_multiplier
    train(model, private, 4)
    state, weights = private.state_dict(), model.state_dict()
    private.close()
    model = network(seed=9)
    model.load_state_dict(weights)
    _, private = private_run(model, ledger=path, **BUDGET)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        private.load_state_dict(state)
    assert private.noise_multiplier == z
    train(model, private, 6)
    assert [entry.count for entry in private._context.ledger.history()] == [5, 10]
    assert until_exhausted(model, private) <= 1


@pytest.mark.slow
def test_a_run_with_another_plan_is_another_run(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    model, private = private_run(ledger=path, **BUDGET)
    train(model, private, 5)
    state = private.state_dict()
    private.close()
    model.zero_grad()
    _, private = private_run(model, ledger=path, **{**BUDGET, "epsilon": 3.0, "epochs": 4})
    with pytest.warns(PrivacyWarning, match="fresh secret"):
        private.load_state_dict(state)
    train(model, private, 20)
    assert len({entry.run for entry in private._context.ledger.history()}) == 2
    assert private.spent().accountant == "renyi-filter" and private.spent().epsilon <= 3


# What is stated


def test_one_run_is_stated_by_pld() -> None:
    model, private = private_run(**BUDGET)
    train(model, private, 3)
    spent, said = private.spent(), private.statement()
    assert spent.accountant == "pld" and spent.assumption == "" and FIXED not in str(said)
    assert said.to_dict()["epsilon_if_runs_were_fixed"] is None
    assert "epsilon 2; a step that would exceed it is refused" in str(said)


@pytest.mark.slow
def test_several_runs_are_stated_by_the_filter(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with private_run(ledger=path, **BUDGET)[1] as private:
        train(private._context.model, private, 3)
    model, private = private_run(ledger=FileLedger(path, join=True), **{**BUDGET, "epsilon": 3.0})
    train(model, private, 3)
    tight, spent, said = private.spent(accountant="pld"), private.spent(), private.statement()
    assert spent.accountant == "renyi-filter" and spent.assumption == "" and FIXED not in str(spent)
    assert tight.epsilon < spent.epsilon and str(tight).endswith(FIXED)
    assert said.spent == spent and said.if_fixed == tight.epsilon
    text = str(said)
    assert f"({spent.epsilon:.4g}"[:5] in text and "2 runs share this ledger" in text and FIXED in text
    assert "epsilon 3 for all runs together; a step that would exceed it is refused" in text
    plain = said.to_dict()
    assert plain["budget"] == 3 and plain["epsilon_if_runs_were_fixed"] == tight.epsilon
    assert len({entry["run"] for entry in plain["history"]}) == 2
    private.close()
    assert str(of_ledger(path)) == str(private.statement())
    assert of_ledger(path).to_dict() == {**plain, "weights": private.statement().weights}


def test_a_budget_that_not_all_runs_have_is_not_that_of_the_ledger() -> None:
    open_ledger = MemoryLedger()
    model, private = private_run(ledger=open_ledger, **BUDGET)
    train(model, private, 3)
    other, free = private_run(ledger=open_ledger, noise_multiplier=0.5)
    train(other, free, 9)
    assert private.spent().epsilon > EPSILON
    for said in (private.statement(), free.statement()):
        assert said.to_dict()["budget"] is None and "would exceed it" not in str(said)
        assert "none for the ledger as a whole: some of its runs have no budget" in str(said)


def test_a_ledger_of_an_unknown_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    header = {"kind": "header", "format": 1, "run": "ab", "block": 64, "header": {}}
    path.write_bytes(LedgerState().seal(header) + b"\n")
    for use in (ledger.read, FileLedger):
        with pytest.raises(LedgerError, match=r"line 1.*an unknown format.*Use the version that wrote it"):
            use(path)
