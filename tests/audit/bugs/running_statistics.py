"""Batch clipping bounds the gradient, but the running statistics of batch norm are released without noise."""

from functools import partial

import pytest
import torch
from torch import nn

from clipwise import Batch
from clipwise.audit.trial import run_of
from clipwise.validation import step_guard, step_inputs
from clipwise.validation.inventory import ModelState
from tests.audit.bug import Bug, Subject, losses, rows


def plant(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step_inputs, "require_no_batch_statistics", lambda *_: None)
    patch.setattr(step_guard, "require_no_statistics_in", lambda *_: None)
    patch.setattr(step_guard.BufferGuard, "compare_listed", lambda self: None)
    patch.setattr(ModelState, "changed", lambda self, *_, **__: [])


def normalized(steps: int) -> Subject:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    return run_of(model, losses, rows(), clipping=Batch(max_norm=1.0), sampling="full", sample_rate=None, steps=steps)


BUG = Bug(
    "released running statistics",
    plant,
    ("neighbours",),
    subject=partial(normalized, 2),
    attacked=partial(normalized, 1),
)
