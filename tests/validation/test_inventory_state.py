"""No statement is made about a model that something else than the run changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from clipwise import Lipschitz, MemoryLedger, Private
from clipwise.errors import ConfigurationError, LedgerError, PrivacyWarning, StepError
from clipwise.layers import ClipInput, recompute_statistics, replace_batchnorm, without_running_statistics
from clipwise.report.statement import of_ledger
from clipwise.validation import inventory
from clipwise.validation.inventory import ModelState
from tests.runs import CLASSES, FEATURES, HIDDEN, data, losses_of, network, private_run, sgd, train
from tests.user_loops.world import Counts

NOT_OURS = r"is not what the last release, or make_private, left.*declare_update"
LOOKS: dict[str, Callable[[Private], Any]] = {
    "draw": lambda private: next(iter(private.loader)),
    "spent": lambda private: private.spent(),
    "tradeoff": lambda private: private.tradeoff(),
    "statement": lambda private: private.statement(),
    "state_dict": lambda private: private.state_dict(),
    "close": lambda private: private.close(),
}


def plain_epoch(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One epoch of plain SGD."""
    for batch in DataLoader(data(), batch_size=8):
        optimizer.zero_grad()
        losses_of(model, batch).mean().backward()
        optimizer.step()
    optimizer.zero_grad()


# A plain loop


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_plain_epoch_is_refused_at_every_check(look: str, when: str) -> None:
    model, private = private_run(sampling="fixed-size")
    if when == "after":
        train(model, private, 2)
    with pytest.warns(PrivacyWarning, match=r"gradients that private.backward did not write") as caught:
        plain_epoch(model, private.optimizer)
    assert len(caught) == 1 and caught[0].filename == __file__
    with pytest.raises(StepError, match=NOT_OURS):
        LOOKS[look](private)


def test_a_plain_epoch_before_any_release_leaves_no_statement_of_epsilon_0() -> None:
    model, private = private_run(sampling="fixed-size")
    assert private.statement().spent.epsilon == 0
    with pytest.warns(PrivacyWarning):
        plain_epoch(model, private.optimizer)
    with pytest.raises(StepError, match=NOT_OURS):
        private.statement()


def test_a_framework_that_steps_with_a_closure_is_refused() -> None:
    model, private = private_run(sampling="fixed-size")

    def closure() -> Tensor:
        private.optimizer.zero_grad()
        loss = losses_of(model, data()[:8]).mean()
        loss.backward()
        return loss

    with pytest.warns(PrivacyWarning, match="did not write"):
        private.optimizer.step(closure)
    with pytest.raises(StepError, match=NOT_OURS):
        private.spent()


@pytest.mark.parametrize("look", ["statement", "state_dict", "close", "step"])
@pytest.mark.parametrize("fused", [False, True])
def test_updates_that_torch_does_not_count_are_found(look: str, fused: bool) -> None:
    model, private = private_run(sampling="fixed-size")
    train(model, private, 1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
        if not fused:
            p.data -= 0.1
    if fused:
        torch.optim.SGD(model.parameters(), lr=0.1, fused=True).step()
    model.zero_grad()
    with pytest.raises(StepError, match=NOT_OURS):
        train(model, private, 1) if look == "step" else LOOKS[look](private)
    assert private.steps == 1


def test_an_optimizer_with_plain_gradients_is_refused_after_the_weights_are_restored() -> None:
    """Its momentum still holds them."""
    model, private = private_run(model := network(), sgd(model, momentum=0.9), sampling="fixed-size")
    train(model, private, 1)
    state, weights = copy.deepcopy(private.state_dict()), copy.deepcopy(model.state_dict())
    with pytest.warns(PrivacyWarning):
        plain_epoch(model, private.optimizer)
    model.load_state_dict(weights)
    with pytest.raises(StepError, match=r"stepped on gradients that private.backward did not write"):
        private.spent()
    with pytest.warns(PrivacyWarning, match="fresh secret"):
        private.load_state_dict(state)
    train(model, private, 1)
    private.close()


# Allowed changes


def test_changes_that_keep_the_contents_are_allowed() -> None:
    model, private = private_run(sampling="fixed-size", ema=0.5)
    train(model, private, 2)
    with private.ema.applied():
        private.spent()
        assert "verified" in str(private.statement())
    own = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    model.load_state_dict(own)
    model.to(torch.float32)
    train(model, private, 1)
    model.half()
    private.spent()
    assert "verified" in str(private.statement())
    private.ema.copy_to(model)
    private.close()


def test_other_weights_in_another_dtype_are_found() -> None:
    model, private = private_run(sampling="fixed-size")
    train(model, private, 1)
    with torch.no_grad():
        model[0].weight.mul_(1.01)  # type: ignore[index, union-attr]
    model.half()
    with pytest.raises(StepError, match=r"'0.weight'"):
        private.spent()


def test_weights_trained_inside_a_block_of_averages_are_found() -> None:
    model, private = private_run(sampling="fixed-size", ema=0.5)
    train(model, private, 2)
    with private.ema.applied():
        model[0].weight.data += 1.0  # type: ignore[index, union-attr]
        with pytest.raises(StepError, match=NOT_OURS):
            private.statement()
    private.close()


def test_averages_that_the_user_updated_are_not_those_of_releases() -> None:
    model, private = private_run(sampling="fixed-size", ema=0.0)
    train(model, private, 1)
    model[0].weight.data += 1.0  # type: ignore[index, union-attr]
    private.ema.update()
    with private.ema.applied(), pytest.raises(StepError, match=NOT_OURS):
        private.statement()


def test_averages_exclude_weights_of_a_plain_step() -> None:
    model, private = private_run(sampling="fixed-size", ema=0.5)
    private.backward(losses_of(model, next(iter(private.loader))))
    losses_of(model, data()[:8]).mean().backward()
    with pytest.warns(PrivacyWarning, match="did not write"):
        private.optimizer.step()
    assert private.ema.updates == 0
    with pytest.raises(StepError, match=NOT_OURS):
        private.statement()


def test_the_weights_of_a_checkpoint_are_accepted_alone() -> None:
    """For instance the best weights so far, restored at the end."""
    model, private = private_run(sampling="fixed-size")
    train(model, private, 1)
    private.state_dict()
    best = copy.deepcopy(model.state_dict())
    train(model, private, 1)
    other = copy.deepcopy(model.state_dict())
    train(model, private, 1)
    model.load_state_dict(best)
    assert private.spent().steps == 3
    model.load_state_dict(other)  # was never saved
    with pytest.raises(StepError, match=NOT_OURS):
        private.spent()


def test_the_projection_of_lipschitz_and_updates_by_hand_are_the_runs_own() -> None:
    model = nn.Sequential(ClipInput(1.0), nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    _, private = private_run(model, clipping=Lipschitz(0.5, input_norm=1.0), sampling="fixed-size")
    for number, (x, y) in enumerate(private.loader):
        outputs = model(x)
        losses = nn.functional.cross_entropy(outputs, y, reduction="none")
        if number % 2:
            private.step(losses, outputs)
        else:
            private.backward(losses, outputs)
            private.optimizer.step()
        private.statement()
    private.close()


def test_the_projection_of_lipschitz_does_not_hide_uncounted_writes() -> None:
    model = nn.Sequential(ClipInput(1.0), nn.Linear(FEATURES, CLASSES))
    _, private = private_run(model, clipping=Lipschitz(0.5, input_norm=1.0), sampling="fixed-size")
    model[1].weight.data += 1.0
    with pytest.raises(StepError, match=NOT_OURS):
        next(iter(private.loader))


def test_public_statistics_follow_the_weights_and_are_no_change() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, CLASSES))
    model, statistics = replace_batchnorm(model, torch.randn(8, FEATURES), "public")
    _, private = private_run(model, sampling="fixed-size")
    train(model, private, 2)
    model.to(torch.float32)
    statistics.refresh(force=True)
    private.close()


def test_an_interrupted_update_belongs_to_the_run() -> None:
    model, private = private_run(sampling="fixed-size")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = private.optimizer.register_step_post_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(model, private, 1)
    handle.remove()
    train(model, private, 1)
    private.close()


# Buffers


def test_an_evaluation_in_train_mode_that_updates_a_buffer_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, CLASSES), Counts())
    _, private = private_run(model, sampling="fixed-size")
    train(model, private, 1)
    with torch.no_grad():
        model(data().tensors[0])
    with pytest.raises(StepError, match=r"'1.total' is not what.*model.eval\(\)"):
        next(iter(private.loader))


def test_statistics_from_public_data_are_declared(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, CLASSES))
    model = without_running_statistics(model).eval()
    recompute_statistics(model, [torch.randn(20, FEATURES)])
    _, private = private_run(model.eval(), ledger=tmp_path / "ledger", sampling="fixed-size")
    train(model, private, 1)
    recompute_statistics(model, [torch.randn(20, FEATURES)])
    with pytest.raises(StepError, match=r"'1.running_mean'"):
        private.statement()
    private.declare_update("public", "statistics of 20 public rows")
    private.close()
    assert "not verified: public: statistics of 20 public rows" in str(of_ledger(tmp_path / "ledger"))


# Declarations


def test_a_declaration_is_printed_and_counted_and_travels_with_a_checkpoint(tmp_path: Path) -> None:
    model, private = private_run(ledger=tmp_path / "ledger", sampling="fixed-size")
    train(model, private, 1)
    for _ in range(2):
        with torch.no_grad():
            model[0].weight.mul_(0.5)  # type: ignore[index, union-attr]
        private.declare_update(kind="post-processing", reason="weights  halved")
    said = "asserted by the user, not verified: post-processing: weights halved (2 times)"
    assert said in private.statement().assumptions()
    state, weights = private.state_dict(), model.state_dict()
    private.close()
    assert said in str(of_ledger(tmp_path / "ledger")).replace("\n", " ")
    assert of_ledger(tmp_path / "ledger").to_dict()["declared_updates"][0]["kind"] == "post-processing"
    other, second = private_run(sampling="fixed-size")
    other.load_state_dict(weights)
    with pytest.warns(PrivacyWarning, match="fresh secret"):
        second.load_state_dict(state)
    assert said in second.statement().assumptions()


@pytest.mark.parametrize(("kind", "reason"), [("private", "x"), ("public", ""), ("public", "  "), ("public", 3)])
def test_a_declaration_needs_a_kind_and_a_reason(kind: Any, reason: Any) -> None:
    _, private = private_run()
    with pytest.raises(ConfigurationError, match=r"kind|reason"):
        private.declare_update(kind, reason)
    assert not private.statement().declared


def test_a_closed_run_declares_nothing() -> None:
    _, private = private_run()
    private.close()
    with pytest.raises((StepError, LedgerError), match="closed"):
        private.declare_update("public", "too late")


# The end of a run


def test_the_ledger_records_whether_weights_were_verified_at_the_end(tmp_path: Path) -> None:
    for name, spoil in (("well", False), ("ill", True)):
        model, private = private_run(ledger=tmp_path / name, sampling="fixed-size")
        train(model, private, 1)
        assert "not verified: the run is in progress" in str(of_ledger(tmp_path / name))
        if spoil:
            model[0].weight.data += 1  # type: ignore[index, union-attr]
            with pytest.raises(StepError, match=NOT_OURS):
                private.close()
            for look in (private.statement, private.spent):
                with pytest.raises(StepError, match=NOT_OURS):
                    look()
        else:
            private.close()
    assert "verified when the run was closed" in str(of_ledger(tmp_path / "well"))
    assert "NOT VERIFIED" in str(of_ledger(tmp_path / "ill"))
    assert of_ledger(tmp_path / "ill").exact  # it was settled anyway


def test_an_error_in_the_block_of_a_run_is_not_hidden(tmp_path: Path) -> None:
    model, private = private_run(ledger=tmp_path / "ledger", sampling="fixed-size")
    with pytest.raises(ValueError, match="mine"), private:
        train(model, private, 1)
        model[0].weight.data += 1  # type: ignore[index, union-attr]
        raise ValueError("mine")
    assert "NOT VERIFIED" in str(of_ledger(tmp_path / "ledger"))


def test_the_statement_of_a_closed_run_reports_later_changes() -> None:
    model, private = private_run(sampling="fixed-size")
    train(model, private, 1)
    private.close()
    assert "changed since" not in str(private.statement())
    plain_epoch(model, private.optimizer)  # the closed run does not see this
    assert "the model has changed since then" in str(private.statement())
    with pytest.raises(StepError, match="after the private run was closed"):
        private.state_dict()


# Several runs


def test_runs_on_one_ledger_accept_each_others_updates() -> None:
    ledger = MemoryLedger()
    model, first = private_run(sampling="fixed-size", ledger=ledger)
    train(model, first, 1)
    model.zero_grad()
    _, second = private_run(model, first.optimizer, sampling="fixed-size", ledger=ledger)
    train(model, second, 1)
    assert first.spent().steps == 2


def test_a_run_with_another_ledger_changes_the_weights_of_the_first() -> None:
    model, first = private_run(sampling="fixed-size")
    train(model, first, 1)
    model.zero_grad()
    with pytest.warns(PrivacyWarning, match="another private run"):
        _, second = private_run(model, sampling="fixed-size")
    train(model, second, 1)
    with pytest.raises(StepError, match=NOT_OURS):
        first.statement()


def test_a_new_run_reports_changes_after_the_last_one() -> None:
    model, first = private_run(sampling="fixed-size")
    train(model, first, 1)
    first.close()
    plain_epoch(model, sgd(model))
    _, second = private_run(model, sampling="fixed-size")
    with pytest.raises(StepError, match=NOT_OURS):
        train(model, second, 1)
    second.declare_update("public", "another epoch on public rows")
    train(model, second, 1)
    second.close()


def test_a_new_run_may_start_from_the_initial_weights() -> None:
    model, first = private_run(sampling="fixed-size")
    weights = copy.deepcopy(model.state_dict())
    train(model, first, 1)
    first.close()
    model.load_state_dict(weights)
    _, second = private_run(model, sampling="fixed-size")
    train(model, second, 1)


class Far:
    """A sample on a device that this machine does not have."""

    device = torch.device("cuda")

    def __init__(self, sample: Tensor) -> None:
        self.sample = self.moved = sample

    def __ne__(self, other: object) -> Any:
        assert isinstance(other, Far)
        self.moved = self.sample != other.sample
        return self


# On an accelerator, changes before an update are kept until `changed` reads them


def test_changes_before_an_update_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    state = ModelState(model)
    model[0].bias.data += 1
    with monkeypatch.context() as patched:
        patched.setattr(inventory, "_bits", lambda sample: Far(sample))
        assert state.changed_before_update() == []
    assert isinstance(state._moved, Far)
    state._moved = state._moved.moved
    state.take()
    assert state.changed(at_draw=True) == []  # as at a draw, which does not synchronise
    assert state.changed() == ["0.bias"] and state.changed(looks_inside=True) == ["0.bias"]
    state.accept()
    assert state.changed(looks_inside=True) == []


def test_layouts_and_types_do_not_matter_and_names_do() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten())
    model.register_buffer("brief", torch.randn(3).bfloat16())
    state = ModelState(model)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert state.changed(looks_inside=True) == []
    model.double()
    assert state.changed(looks_inside=True) == []
    model.append(nn.Linear(1, 1))
    assert state.changed() == ["2.bias", "2.weight"] and not state.is_of_same_tensors()
