"""Wrong parameters, optimizers and losses are refused, and buffers that a forward pass updates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from clipwise.errors import ConfigurationError, StepError, UnsupportedModelError
from clipwise.validation.inventory import BufferGuard
from clipwise.validation.step_inputs import StepGuard, require_losses, require_real, trainable_parameters
from clipwise.validation.training_loop import ReleasedGradients

B, T, D = 7, 4, 5


def sgd(*parameters: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


# Parameters


def test_trainable_parameters_are_those_of_model_and_optimizer() -> None:
    model = nn.Linear(D, 2)
    assert list(trainable_parameters(model, sgd(*model.parameters()))) == ["weight", "bias"]
    model.bias.requires_grad_(False)
    assert list(trainable_parameters(model, sgd(*model.parameters()))) == ["weight"]


def test_wrong_parameters_are_refused_by_name() -> None:
    model = nn.Linear(D, 2)
    everything = sgd(*model.parameters())
    for bad, words in (
        ((lambda x: x, everything), "torch.nn.Module"),
        ((model, list(model.parameters())), "torch.optim.Optimizer"),
        ((model, sgd(model.weight)), "'bias' is trainable but the optimizer"),
        ((model, sgd(*model.parameters(), nn.Parameter(torch.zeros(7)))), r"\(7,\)"),
        ((nn.Linear(D, 2).requires_grad_(False), everything), "no trainable parameter"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            trainable_parameters(*bad)  # type: ignore[arg-type]


def test_complex_parameters_are_refused_where_a_strategy_does_not_take_them() -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(2, dtype=torch.complex64))})
    found = trainable_parameters(model, sgd(*model.parameters()))
    with pytest.raises(ConfigurationError, match=r"'w' is torch\.complex64, and clipping=Lipschitz"):
        require_real(found, "Lipschitz")


# Losses

GOOD = torch.ones(B, requires_grad=True) * 2


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([1.0] * B, "must be a tensor"),
        (GOOD.mean(), "single number"),
        (GOOD[:, None].expand(B, T), "2 dimensions"),
        (GOOD[:, None].expand(B, B), "pair of examples"),
        (GOOD[1:], "one entry for each example"),
        (torch.cat([GOOD, GOOD]), "one entry for each example"),
        (torch.ones(B, dtype=torch.long), "real floating point"),
        (torch.ones(B, dtype=torch.complex64), "real floating point"),
        (GOOD.detach(), "no gradient"),
    ],
)
def test_losses_that_are_not_one_per_example_are_refused(losses: object, words: str) -> None:
    with pytest.raises(StepError, match=words) as error:
        require_losses(losses, B)
    assert str(B) not in str(error.value), "the realised batch size is secret"


def test_one_loss_per_example_is_accepted() -> None:
    assert require_losses(GOOD, B) is GOOD
    assert len(require_losses(GOOD[:0], 0)) == 0


# Buffers


def test_buffers_are_compared_on_later_batches() -> None:
    """After the first batches only versions are compared."""
    model = nn.Linear(D, 2)
    model.register_buffer("count", torch.zeros(()))
    guard = BufferGuard(model)
    for _ in range(5):
        guard.remember()
        guard.compare()
    model.count += 1  # between batches, not in a forward pass
    guard.remember()
    guard.compare()
    model.count += 1
    with pytest.raises(UnsupportedModelError, match="count"):
        guard.compare()


def test_a_nan_in_a_buffer_is_no_change() -> None:
    model = nn.Linear(D, 2)
    model.register_buffer("scale", torch.tensor([torch.nan, 1.0]))
    guard = BufferGuard(model)
    guard.remember()
    guard.compare()


def test_spectral_norm_may_iterate() -> None:
    """Its buffers depend on weights alone."""
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(D, 2))
    guard = BufferGuard(model)
    guard.remember()
    model(torch.randn(3, D))
    guard.compare()


# All checks of the model at once


def _give_gradient(model: nn.Sequential) -> None:
    model[0].weight.grad = torch.ones_like(model[0].weight)


@pytest.mark.parametrize(
    ("change", "words", "is_seen_at_the_draw"),
    [
        (lambda m: m[1].train(), "training mode", False),
        (lambda m: m[1].running_mean.add_(1), "was set or changed", False),
        (lambda m: m[0].weight.register_hook(lambda g: g), "has a hook", False),
        (_give_gradient, "private.backward did not write", False),
        (lambda m: m.append(nn.Linear(2, 2)), "was set or changed", True),
        (lambda m: m[0].bias.requires_grad_(False), "requires_grad", True),
        (lambda m: setattr(m[0], "bias", nn.Parameter(torch.zeros(2))), "was set or changed", True),
    ],
)
def test_a_model_changed_within_a_step_is_refused(
    change: Callable[[nn.Sequential], object], words: str, is_seen_at_the_draw: bool
) -> None:
    model = nn.Sequential(nn.Linear(D, 2), nn.BatchNorm1d(2).eval())
    parameters = dict(model.named_parameters())
    guard = StepGuard(model, parameters, ReleasedGradients(parameters))
    guard.before_draw()
    guard.at_draw(torch.zeros(B, D))
    guard.before_step()
    change(model)
    with pytest.raises((ConfigurationError, StepError, UnsupportedModelError), match=words):
        guard.before_step()
    if is_seen_at_the_draw:
        with pytest.raises(StepError):
            guard.before_draw()
    else:
        guard.before_draw()
