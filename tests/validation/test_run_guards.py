"""Mistakes around a run: other hands on the parameters, `.eval()` left on, fed schedulers, copies."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clipwise import AveragedParameters, MemoryLedger
from clipwise.errors import ConfigurationError, PrivacyWarning, StepError, UnsupportedModelError
from tests.runs import CLASSES, FEATURES, data, losses_of, network, parameters, private_run, same, sgd, train


@contextmanager
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        yield


# Copies


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_run_cannot_be_copied(copied: Any) -> None:
    model, private = private_run()
    with pytest.raises(StepError, match=r"cannot be copied or pickled.*state_dict"):
        copied(private)
    train(model, private, 1)  # and goes on


def test_what_is_meant_to_travel_can_be_copied() -> None:
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


def test_momentum_and_weight_decay_see_released_gradients_only() -> None:
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


# Other hands on the parameters


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


def test_averages_that_are_put_back_are_no_change() -> None:
    model, private = private_run(sampling="fixed-size")
    averages = AveragedParameters(model)
    with silent():
        for batch in private.loader:
            private.step(losses_of(model, batch))
            averages.update()
            with averages.applied():
                pass


def test_an_optimizer_that_is_stepped_by_hand_is_no_change() -> None:
    model, private = private_run(sampling="fixed-size")
    with silent():
        for batch in private.loader:
            private.backward(losses_of(model, batch))
            private.optimizer.step()


def test_another_run_on_the_same_model_is_warned_of() -> None:
    model, first = private_run(sampling="fixed-size")
    train(model, first, 1)
    with pytest.warns(PrivacyWarning, match=r"'0.weight' is trained by another private run") as caught:
        private_run(model)
    assert caught[0].filename == private_run.__code__.co_filename
    first.close()


def test_runs_that_share_a_ledger_or_follow_each_other_may_share_a_model() -> None:
    book = MemoryLedger()
    model, first = private_run(sampling="fixed-size", ledger=book)
    train(model, first, 1)
    model.zero_grad()
    with silent():
        _, second = private_run(model, sampling="fixed-size", ledger=book)
        train(model, second, 1)
        second.close()
        first.close()
        private_run(model)


# Modes


def with_dropout(layer: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 4), layer or nn.Dropout(0.5), nn.Linear(4, CLASSES))


def test_eval_left_on_is_warned_of_once() -> None:
    torch.seed()  # one that was set by hand is warned of too
    model, private = private_run(with_dropout(), sampling="fixed-size")
    with silent():
        train(model, private, 1)
    model.eval()
    with pytest.warns(PrivacyWarning, match=r"\.eval\(\).*'1' \(Dropout\).*model\.train\(\)") as caught:
        train(model, private, 3)
    assert len(caught) == 1 and caught[0].filename == train.__code__.co_filename


@pytest.mark.parametrize("model", [network().eval(), with_dropout(nn.Dropout(0.0)).eval()])
def test_eval_that_changes_nothing_is_fine(model: nn.Module) -> None:
    _, private = private_run(model, sampling="fixed-size")
    with silent():
        train(model, private, 2)


# Schedulers


def test_a_scheduler_that_is_fed_a_metric_is_warned_of_and_named_in_the_statement() -> None:
    model, private = private_run(sampling="fixed-size")
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(private.optimizer, patience=0)
    with silent():
        train(model, private, 1)
        plateau.step(1.0)
        train(model, private, 1)  # it has changed nothing yet
    assert "followed a metric" not in str(private.statement())
    plateau.step(2.0)
    with pytest.warns(PrivacyWarning, match=r"ReduceLROnPlateau.*public data"):
        train(model, private, 1)
    assert "followed a metric" in str(private.statement())
    assert [about["followed_metric"] for about in private._context.ledger.about] == [False, True]


def test_a_scheduler_that_counts_steps_is_fine() -> None:
    model, private = private_run(sampling="fixed-size")
    schedule = torch.optim.lr_scheduler.StepLR(private.optimizer, 1, gamma=0.5)
    other = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd(network()))  # of another run
    with silent():
        for _ in range(4):
            train(model, private, 1)
            schedule.step()
            other.step(1.0)
    assert "followed a metric" not in str(private.statement())


# A forward pass that is no part of the losses


def test_a_forward_pass_beside_the_losses_changes_nothing() -> None:
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


def test_a_forward_pass_beside_the_losses_that_learns_is_refused() -> None:
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


# Releases that nobody uses


def test_who_steps_on_every_batch_is_told_nothing() -> None:
    with silent():
        model, private = private_run(sampling="fixed-size", max_physical_batch_size=2)
        for batch in private.loader.pieces():
            if private.backward(losses_of(model, batch)):
                private.optimizer.step()
