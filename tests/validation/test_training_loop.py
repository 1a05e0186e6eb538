"""Mistakes in training loops are refused or cause warnings."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clipwise import AveragedParameters, FileLedger
from clipwise.errors import ConfigurationError, PrivacyWarning, StepError, UnsupportedModelError
from clipwise.validation.training_loop import require_process_group
from tests.runs import CLASSES, FEATURES, data, losses_of, network, parameters, private_run, same, sgd, train


@contextmanager
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        yield


# Gradient accumulation


def test_a_second_backward_before_the_update_is_refused_and_costs_nothing() -> None:
    model, private = private_run(sampling="fixed-size")
    batches = iter(private.loader)
    private.backward(losses_of(model, next(batches)))
    gradient = model[0].weight.grad.clone()  # type: ignore[index, union-attr]
    with pytest.raises(StepError, match=r"before optimizer.step\(\).*batch_size.*max_physical_batch_size"):
        private.backward(losses_of(model, next(batches)))
    assert private.steps == 1
    assert torch.equal(model[0].weight.grad, gradient)  # type: ignore[index, union-attr]
    private.optimizer.step()
    train(model, private, 1)
    private.close()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_released_gradient_may_be_discarded(set_to_none: bool) -> None:
    model, private = private_run(sampling="fixed-size")
    batches = iter(private.loader)
    private.backward(losses_of(model, next(batches)))
    private.optimizer.zero_grad(set_to_none=set_to_none)
    private.backward(losses_of(model, next(batches)))
    assert private.steps == 2


def test_losses_over_a_constant_are_harmless() -> None:
    model, private = private_run(sampling="fixed-size", max_physical_batch_size=2)
    for batch in private.loader.pieces():
        private.step(losses_of(model, batch) / 4)
    private.close()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_that_was_cleared_before_the_update_is_warned_of_once(set_to_none: bool) -> None:
    model, private = private_run(sampling="fixed-size")
    with pytest.warns(PrivacyWarning, match="cleared before it was used") as caught:
        for batch in private.loader:
            private.backward(losses_of(model, batch))
            private.optimizer.zero_grad(set_to_none=set_to_none)
            private.optimizer.step()
    assert len(caught) == 1 and caught[0].filename == __file__


# Gradients that were changed after the release


@pytest.mark.parametrize(
    "change",
    [
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3),
        lambda model: [p.grad.mul_(0.25) for p in model.parameters()],
        lambda model: [setattr(p, "grad", p.grad / 3) for p in model.parameters()],
        lambda model: [p.grad.data.mul_(0.25) for p in model.parameters()],
    ],
)
def test_a_released_gradient_that_is_made_smaller_is_warned_of_once(change: Callable[[Any], Any]) -> None:
    model, private = private_run(sampling="fixed-size")
    with pytest.warns(PrivacyWarning, match=r"already clipped and noised.*Remove it") as caught:
        for batch in private.loader:
            private.optimizer.zero_grad()
            private.backward(losses_of(model, batch))
            change(model)
            private.optimizer.step()
    assert len(caught) == 1 and caught[0].filename == __file__
    private.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: losses_of(model, data()[:8]).mean().backward(),
        lambda model: [p.grad.mul_(-1) for p in model.parameters()],
        lambda model: model[0].weight.grad.mul_(2),  # one layer only
        lambda model: [p.grad.data.add_(0.1) for p in model.parameters()],
    ],
)
def test_gradients_that_are_no_multiple_of_the_release_need_a_declaration(change: Callable[[Any], Any]) -> None:
    model, private = private_run(sampling="fixed-size")
    private.backward(losses_of(model, next(iter(private.loader))))
    change(model)
    with pytest.warns(PrivacyWarning, match="did not write"):
        private.optimizer.step()
    private.optimizer.zero_grad()
    with pytest.raises(StepError, match="declare_update"):
        private.spent()
    private.declare_update("post-processing", "gradients were changed after the noise")
    train(model, private, 1)


def test_steps_by_hand_do_not_warn_and_are_verified() -> None:
    model, private = private_run(sampling="fixed-size")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in private.loader:
            private.backward(losses_of(model, batch))
            private.optimizer.step()
            private.statement()
        private.close()


@pytest.mark.parametrize("act", ["step", "backward"])
def test_a_second_update_with_one_gradient_is_warned_of_once_and_verified(act: str) -> None:
    model, private = private_run(sampling="fixed-size")
    with pytest.warns(PrivacyWarning, match=r"a second time.*not at all after private\.step") as caught:
        for batch in private.loader:
            getattr(private, act)(losses_of(model, batch))
            private.optimizer.step()
            if act == "backward":
                private.optimizer.step()
    assert len(caught) == 1 and caught[0].filename == __file__
    private.statement()


# Loss scaling


@pytest.mark.parametrize("act", ["step", "backward"])
def test_scaled_losses_are_refused_before_the_first_release(act: str) -> None:
    model, private = private_run(sampling="fixed-size")
    scaler = torch.amp.GradScaler("cpu")  # type: ignore[attr-defined]
    before = parameters(model)
    losses = scaler.scale(losses_of(model, next(iter(private.loader))))
    with pytest.raises(StepError, match=r"GradScaler.*bfloat16"):
        getattr(private, act)(losses)
    assert private.steps == 0 and same(before, parameters(model))


@pytest.mark.parametrize("factor", [1.0, 2.0, torch.tensor(0.5), torch.tensor(3.0), torch.tensor(1000.0)])
def test_other_factors_are_accepted(factor: Any) -> None:
    model, private = private_run(sampling="fixed-size")
    private.step(losses_of(model, next(iter(private.loader))) * factor)


def test_a_scaler_that_is_switched_off_changes_nothing() -> None:
    model, private = private_run(sampling="fixed-size")
    scaler = torch.amp.GradScaler("cpu", enabled=False)  # type: ignore[attr-defined]
    private.step(scaler.scale(losses_of(model, next(iter(private.loader)))))


# Several processes


def test_ranks_after_make_private_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, private = private_run(sampling="fixed-size")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ConfigurationError, match=r"2 ranks and was initialised after make_private"):
        train(model, private, 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    train(model, private, 1)


@pytest.mark.parametrize(
    ("variables", "is_refused"),
    [({"RANK": "0", "WORLD_SIZE": "2"}, True), ({"RANK": "0", "WORLD_SIZE": "1"}, False), ({"WORLD_SIZE": "8"}, False)],
)
def test_torchrun_is_refused_before_the_process_group_exists(
    variables: dict[str, str], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if is_refused:
        with pytest.raises(ConfigurationError, match="torchrun"):
            private_run()
    else:
        require_process_group()
        model, private = private_run(sampling="fixed-size")
        train(model, private, 1)


def test_a_second_optimizer_on_released_gradients_is_refused() -> None:
    model, private = private_run(sampling="fixed-size")
    private.backward(losses_of(model, next(iter(private.loader))))
    sgd(model).step()
    with pytest.raises(StepError, match="second optimizer"):
        private.spent()


# Copies


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_run_cannot_be_copied(copied: Any) -> None:
    model, private = private_run()
    with pytest.raises(StepError, match=r"cannot be copied or pickled.*state_dict"):
        copied(private)
    train(model, private, 1)  # the run continues


def test_state_dicts_models_and_spent_can_be_copied() -> None:
    model, private = private_run()
    train(model, private, 1)
    assert copy.deepcopy(private.state_dict())["position"] == 1
    assert pickle.loads(pickle.dumps(private.spent())) == private.spent()
    assert same(parameters(copy.deepcopy(model)), parameters(model))


# Hooks, momentum and weight decay


def test_a_hook_on_a_parameter_is_refused() -> None:
    model = network()
    handle = model[0].weight.register_hook(lambda g: g)
    with pytest.raises(ConfigurationError, match=r"'0.weight' has a hook.*Remove it"):
        private_run(model)
    handle.remove()
    _, private = private_run(model, sampling="fixed-size")
    train(model, private, 1)
    model[2].bias.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ConfigurationError, match=r"'2.bias' has a hook"):
        train(model, private, 1)


def test_momentum_and_weight_decay_use_released_gradients_only() -> None:
    model, private = private_run(
        model := network(), sgd(model, lr=0.5, momentum=0.9, weight_decay=0.1), sampling="fixed-size"
    )
    shadow, velocity = parameters(model), dict[str, Tensor]()
    for batch in private.loader:
        assert private.backward(losses_of(model, batch))
        for name, p in model.named_parameters():
            assert p.grad is not None
            step = p.grad + 0.1 * shadow[name]
            velocity[name] = step if name not in velocity else 0.9 * velocity[name] + step
            shadow[name] = shadow[name] - 0.5 * velocity[name]
        private.optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), shadow[name])


# Other code that changes parameters


def test_a_second_optimizer_between_two_steps_is_refused() -> None:
    model, private = private_run(sampling="fixed-size")
    second = sgd(model, lr=0.1)
    batches = iter(private.loader)
    private.step(losses_of(model, next(batches)))
    model.zero_grad()
    losses_of(model, data()[:8]).mean().backward()
    second.step()
    model.zero_grad()
    with pytest.raises(StepError, match=r"'0.weight' is not what the last release.*declare_update"):
        next(batches)


def test_a_second_optimizer_within_a_step_is_refused() -> None:
    model, private = private_run(sampling="fixed-size")
    second = sgd(model, lr=0.1)
    batch = next(iter(private.loader))
    losses = losses_of(model, batch)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    second.step()
    with pytest.raises(UnsupportedModelError, match=r"'0.weight' was set or changed between the draw"):
        private.step(losses)


def test_swapped_and_restored_averages_are_no_change() -> None:
    model, private = private_run(sampling="fixed-size")
    averages = AveragedParameters(model)
    with silent():
        for batch in private.loader:
            private.step(losses_of(model, batch))
            averages.update()
            with averages.applied():
                pass


def test_manual_optimizer_steps_are_no_change() -> None:
    model, private = private_run(sampling="fixed-size")
    with silent():
        for batch in private.loader:
            private.backward(losses_of(model, batch))
            private.optimizer.step()


@pytest.mark.parametrize("is_closed", [False, True])
def test_another_run_on_the_same_model_is_warned_of(is_closed: bool) -> None:
    model, first = private_run(sampling="fixed-size")
    train(model, first, 1)
    if is_closed:
        first.close()
    with pytest.warns(PrivacyWarning, match=r"'0.weight' was trained by another private run") as caught:
        private_run(model)
    assert caught[0].filename == private_run.__code__.co_filename
    first.close()


def test_steps_of_a_newer_run_with_the_same_optimizer_are_not_warned_of() -> None:
    model, first = private_run(sampling="fixed-size")
    train(model, first, 1)
    with pytest.warns(PrivacyWarning, match="was trained by another private run"):
        _, second = private_run(model, optimizer=first.optimizer, sampling="fixed-size")
    with silent():
        train(model, second, 2)
        second.statement()
    with pytest.raises(StepError, match="left in the model"):
        first.statement()


def test_runs_that_share_a_ledger_may_share_a_model(tmp_path: Path) -> None:
    ledger = FileLedger(tmp_path / "ledger")
    model, first = private_run(sampling="fixed-size", ledger=ledger)
    train(model, first, 1)
    model.zero_grad()
    with silent():
        _, second = private_run(model, sampling="fixed-size", ledger=ledger)
        train(model, second, 1)
        second.close()
        first.close()
        private_run(model, sampling="fixed-size", ledger=FileLedger(tmp_path / "ledger", join=True))


# Modes


def with_dropout(layer: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 4), layer or nn.Dropout(0.5), nn.Linear(4, CLASSES))


def test_eval_left_on_is_warned_of_once() -> None:
    torch.seed()  # a manual seed would cause another warning
    model, private = private_run(with_dropout(), sampling="fixed-size")
    with silent():
        train(model, private, 1)
    model.eval()
    with pytest.warns(PrivacyWarning, match=r"\.eval\(\).*'1' \(Dropout\).*model\.train\(\)") as caught:
        train(model, private, 3)
    assert len(caught) == 1 and caught[0].filename == train.__code__.co_filename


@pytest.mark.parametrize("model", [network().eval(), with_dropout(nn.Dropout(0.0)).eval()])
def test_eval_without_random_layers_is_accepted(model: nn.Module) -> None:
    _, private = private_run(model, sampling="fixed-size")
    with silent():
        train(model, private, 2)


# Schedulers


def test_a_scheduler_with_a_metric_causes_a_warning_and_is_in_the_statement() -> None:
    model, private = private_run(sampling="fixed-size")
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(private.optimizer, patience=0)
    with silent():
        train(model, private, 1)
        plateau.step(1.0)
        train(model, private, 1)  # the learning rate has not changed yet
    assert "depended on a metric" not in str(private.statement())
    plateau.step(2.0)
    with pytest.warns(PrivacyWarning, match=r"ReduceLROnPlateau.*public data"):
        train(model, private, 1)
    assert "depended on a metric" in str(private.statement())
    assert [about["followed_metric"] for about in private._context.ledger.about] == [False, True]


def test_a_scheduler_that_counts_steps_is_accepted() -> None:
    model, private = private_run(sampling="fixed-size")
    schedule = torch.optim.lr_scheduler.StepLR(private.optimizer, 1, gamma=0.5)
    other = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd(network()))  # of another run
    with silent():
        for _ in range(4):
            train(model, private, 1)
            schedule.step()
            other.step(1.0)
    assert "depended on a metric" not in str(private.statement())


@pytest.mark.parametrize("is_right", [True, False])
def test_a_scheduler_that_counts_pieces_is_warned_of_once(is_right: bool) -> None:
    model, private = private_run(sampling="fixed-size", max_physical_batch_size=3)
    schedule = torch.optim.lr_scheduler.StepLR(private.optimizer, 1, gamma=0.9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PrivacyWarning)
        for batch in private.loader.pieces():
            if private.step(losses_of(model, batch)) or not is_right:
                schedule.step()
    found = [str(w.message) for w in caught if "between two pieces of one batch" in str(w.message)]
    assert len(found) == (0 if is_right else 1)


# Forward passes outside of the losses


def test_a_forward_pass_outside_of_the_losses_is_accepted() -> None:
    runs = []
    for looks in (False, True):
        model, private = private_run(sampling="fixed-size", seed=1)
        for batch in private.loader:
            losses = losses_of(model, batch)
            if looks:
                model(batch[0].detach() + 1).sum()
            private.step(losses)
        runs.append(parameters(model))
    assert same(*runs)


def test_a_forward_pass_outside_of_the_losses_that_updates_a_buffer_is_refused() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                self.seen += x.detach().sum()
            return x

    model = nn.Sequential(nn.Linear(FEATURES, CLASSES), Counts())
    _, private = private_run(model, sampling="fixed-size")
    batch = next(iter(private.loader))
    losses = losses_of(model, batch)
    with torch.no_grad():
        model(batch[0])
    with pytest.raises(UnsupportedModelError, match=r"Buffer 1\.seen|Buffer '1\.seen'"):
        private.step(losses)


# Unused releases


def test_a_step_on_every_batch_causes_no_warning() -> None:
    with silent():
        model, private = private_run(sampling="fixed-size", max_physical_batch_size=2)
        for batch in private.loader.pieces():
            if private.backward(losses_of(model, batch)):
                private.optimizer.step()
