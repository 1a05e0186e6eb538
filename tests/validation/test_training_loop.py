"""Idioms of plain training that do not go with a private run: refused, or warned of before anything is lost."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from clipwise.errors import ConfigurationError, PrivacyWarning, StepError
from clipwise.validation.training_loop import require_one_process
from tests.runs import data, losses_of, parameters, private_run, same, sgd, train

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
def test_a_released_gradient_may_be_thrown_away(set_to_none: bool) -> None:
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
    with pytest.warns(PrivacyWarning, match=r"already clipped and noised.*Leave it out") as caught:
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
        lambda model: model[0].weight.grad.mul_(2),  # of one layer: not of all alike
        lambda model: [p.grad.data.add_(0.1) for p in model.parameters()],
    ],
)
def test_what_is_not_a_multiple_of_the_release_is_to_be_declared(change: Callable[[Any], Any]) -> None:
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


def test_steps_by_hand_are_silent_and_verified() -> None:
    model, private = private_run(sampling="fixed-size")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in private.loader:
            private.backward(losses_of(model, batch))
            private.optimizer.step()
            private.statement()
        private.optimizer.step()  # once more with the same gradient
        private.close()


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
def test_other_factors_are_none_of_a_scaler(factor: Any) -> None:
    model, private = private_run(sampling="fixed-size")
    private.step(losses_of(model, next(iter(private.loader))) * factor)


def test_a_scaler_that_is_switched_off_changes_nothing() -> None:
    model, private = private_run(sampling="fixed-size")
    scaler = torch.amp.GradScaler("cpu", enabled=False)  # type: ignore[attr-defined]
    private.step(scaler.scale(losses_of(model, next(iter(private.loader)))))


# Several processes


def test_ranks_of_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, private = private_run(sampling="fixed-size")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ConfigurationError, match=r"2 ranks.*Start one process"):
        private_run()
    with pytest.raises(ConfigurationError, match="2 ranks"):
        train(model, private, 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    train(model, private, 1)


@pytest.mark.parametrize(
    ("variables", "is_refused"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, True),
        ({"RANK": "0", "WORLD_SIZE": "1"}, False),
        ({"WORLD_SIZE": "8"}, False),
    ],
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
        require_one_process()
        model, private = private_run(sampling="fixed-size")
        train(model, private, 1)


def test_a_second_optimizer_on_released_gradients_is_not_known_to_the_run() -> None:
    model, private = private_run(sampling="fixed-size")
    private.backward(losses_of(model, next(iter(private.loader))))
    sgd(model).step()
    with pytest.raises(StepError, match="second optimizer"):
        private.spent()
