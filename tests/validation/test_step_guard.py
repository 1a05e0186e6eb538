"""A forward pass may not change the model, and nothing may change it within a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from clipwise.errors import ConfigurationError, StepError, UnsupportedModelError
from clipwise.validation.inventory import Inventory
from clipwise.validation.step_guard import BufferGuard, StepGuard

B, D = 7, 5


# Buffers


def test_buffers_are_compared_on_later_batches() -> None:
    """After the first batches only versions are compared."""
    model = nn.Linear(D, 2)
    model.register_buffer("count", torch.zeros(()))
    guard = BufferGuard(Inventory(model))
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
    guard = BufferGuard(Inventory(model))
    guard.remember()
    guard.compare()


def test_spectral_norm_may_iterate() -> None:
    """Its buffers depend on weights alone."""
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(D, 2))
    guard = BufferGuard(Inventory(model))
    guard.remember()
    model(torch.randn(3, D))
    guard.compare()


# All checks of the model at once


@pytest.mark.parametrize(
    ("change", "words", "is_seen_at_the_draw"),
    [
        (lambda m: m[1].train(), "training mode", False),
        (lambda m: m[1].running_mean.add_(1), "was set or changed", False),
        (lambda m: m[0].weight.register_hook(lambda g: g), "has a hook", False),
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
    guard = StepGuard(Inventory(model), parameters)
    guard.before_draw()
    guard.remember(torch.zeros(B, D))
    guard.before_step()
    change(model)
    with pytest.raises((ConfigurationError, StepError, UnsupportedModelError), match=words):
        guard.before_step()
    if is_seen_at_the_draw:
        with pytest.raises(StepError):
            guard.before_draw()
    else:
        guard.before_draw()
