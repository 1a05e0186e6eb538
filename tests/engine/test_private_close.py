"""How a run ends: what stays counted after an error, whether the count is exact, and a ledger that was removed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from clipwise import Private
from clipwise.errors import BudgetExhausted, LedgerError, PrivacyWarning
from clipwise.ledger import ledger
from clipwise.noise import mechanism
from clipwise.report.statement import of_ledger
from tests.runs import SIZE, data, losses_of, parameters, private_run, same, train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


def counted(path: Path) -> tuple[int, bool]:
    """What the file says after the end: how many releases, and whether just these were made."""
    found = ledger.read(path)
    assert found.clean and of_ledger(path).to_dict()["count_is_exact"] is found.exact
    return found.position, found.exact


def fail_on_a_batch(model: nn.Module, private: Private) -> None:
    """A training loop that fails between a batch and its step."""
    for _ in private.loader:
        raise ZeroDivisionError


# After an error


@pytest.mark.parametrize("steps", [1, 4, 12])
@pytest.mark.parametrize("how", ["with", "finally", "except"])
def test_a_batch_that_was_handed_out_stays_counted(path: Path, how: str, steps: int) -> None:
    """The rest of the reservation is given back. The error may depend on the data of the batch."""
    model, private = private_run(ledger=path)
    train(model, private, steps)
    with pytest.raises(ZeroDivisionError):
        if how == "with":
            with private:
                fail_on_a_batch(model, private)
        elif how == "finally":
            try:
                fail_on_a_batch(model, private)
            finally:
                private.close()
        else:
            try:
                fail_on_a_batch(model, private)
            except ZeroDivisionError:
                private.close()
                raise
    assert counted(path) == (steps + 1, False)


def test_an_error_without_a_batch_costs_nothing(path: Path) -> None:
    model, private = private_run(ledger=path)
    with pytest.raises(ZeroDivisionError), private:
        train(model, private, 4)
        raise ZeroDivisionError
    assert counted(path) == (4, True)


def test_an_end_without_an_error_costs_nothing(path: Path) -> None:
    model, private = private_run(ledger=path, max_physical_batch_size=3, sampling="shuffled")
    train(model, private, 4)
    next(iter(private.loader))
    assert private.step(losses_of(model, next(iter(private.loader.pieces())))) is False  # a piece of a batch
    private.close()
    assert counted(path) == (4, True)


def test_a_batch_of_which_a_piece_was_used_stays_counted(path: Path) -> None:
    model, private = private_run(ledger=path, max_physical_batch_size=3, sampling="shuffled")
    with pytest.raises(ZeroDivisionError), private:
        assert private.step(losses_of(model, next(iter(private.loader.pieces())))) is False
        raise ZeroDivisionError
    assert counted(path) == (1, False)


def test_the_end_of_the_budget_is_no_error_of_the_batch(path: Path) -> None:
    model, private = private_run(ledger=path, epsilon=2.0, delta=1e-5, steps=3)
    with pytest.raises(BudgetExhausted), private:
        train(model, private, 9)
    assert counted(path) == (3, True)


def test_a_failed_step_does_not_pass_the_budget(path: Path) -> None:
    model, private = private_run(ledger=path, epsilon=2.0, delta=1e-5, steps=3)
    with pytest.raises(ZeroDivisionError), private:
        train(model, private, 3)
        fail_on_a_batch(model, private)
    assert counted(path) == (3, False)


class Brittle(Dataset[Any]):
    """A record that cannot be read."""

    def __init__(self) -> None:
        self.inner, self.is_broken = data(), False

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        if self.is_broken:
            raise ValueError("no such record")
        return self.inner[index]


@pytest.mark.parametrize("is_caught", [False, True])
def test_a_batch_that_cannot_be_fetched_stays_counted(path: Path, is_caught: bool) -> None:
    records = Brittle()
    model, private = private_run(dataset=records, ledger=path, sampling="shuffled")
    train(model, private, 3)
    records.is_broken = True
    with pytest.raises(ValueError, match="no such record"):
        train(model, private, 1)
    records.is_broken = False
    if is_caught:
        private.close()
    else:
        with pytest.raises(ZeroDivisionError), private:
            raise ZeroDivisionError
    assert counted(path) == (4, False)


def failing_once(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next release fail after it was charged."""
    honest = mechanism.add_gaussian

    def add_gaussian(*arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(mechanism, "add_gaussian", honest)
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(mechanism, "add_gaussian", add_gaussian)


def test_a_release_that_fails_is_counted_and_not_called_exact(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, private = private_run(ledger=path)
    train(model, private, 2)
    assert private.statement().exact
    failing_once(model, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        train(model, private, 1)
    assert not private.statement().exact
    train(model, private, 2)
    private.close()
    assert counted(path) == (5, False)


@pytest.mark.parametrize("again", [False, True])
def test_a_step_that_fails_stays_counted_unless_it_is_made_again(path: Path, again: bool) -> None:
    model, private = private_run(ledger=path, sampling="fixed-size")
    train(model, private, 2)
    honest, private._context.clipper.clipped_sum = private._context.clipper.clipped_sum, None  # type: ignore[method-assign,assignment]
    with pytest.raises(TypeError):
        train(model, private, 1)
    private._context.clipper.clipped_sum = honest  # type: ignore[method-assign]
    train(model, private, int(again))
    private.close()
    assert counted(path) == (3, again)


# Whether the count is exact


def test_a_run_that_crashed_is_not_exact_when_it_has_gone_on(path: Path) -> None:
    model, private = private_run(ledger=path)
    train(model, private, 5)
    state = private.state_dict()
    private._context.ledger._file.close()  # type: ignore[attr-defined]
    model.zero_grad()
    _, private = private_run(model, ledger=path)
    with pytest.warns(PrivacyWarning, match="fresh secret"):
        private.load_state_dict(state)
    train(model, private, 3)
    said = private.statement()
    assert said.spent.steps == 10 and said.exact is False and said.to_dict()["count_is_exact"] is False
    assert "every release that may have happened is counted" in str(said)
    state = private.state_dict()
    private.close()
    assert counted(path) == (10, False)
    model.zero_grad()
    _, private = private_run(model)  # in a new ledger
    with pytest.warns(PrivacyWarning, match="fresh secret"):
        private.load_state_dict(state)
    assert private.statement().exact is False


# A ledger that was removed


@pytest.mark.parametrize("harm", ["removed", "replaced"])
def test_nothing_is_released_without_a_ledger(path: Path, harm: str) -> None:
    model, private = private_run(ledger=path)
    train(model, private, 4)  # the rest of the block could be used without the file
    content = path.read_bytes()
    path.unlink()
    if harm == "replaced":
        path.write_bytes(content)
    before = parameters(model)
    for look in (lambda: train(model, private, 1), private.spent, private.statement):
        with pytest.raises(LedgerError, match="removed, replaced or shortened"):
            look()
    assert same(before, parameters(model)) and private.steps == 4
    state = private.state_dict()
    with pytest.raises(LedgerError, match="removed, replaced or shortened"):
        private.close()
    model.zero_grad()
    _, private = private_run(model, ledger=path.with_name("new"), resume_file=path.with_name("ledger.resume"))
    private.load_state_dict(state)
    train(model, private, 2)
    private.close()
    assert counted(path.with_name("new")) == (6, True)
