"""Batch norm over the whole batch with per-example clipping: one record changes the gradients of all others."""

from functools import partial

import pytest
import torch
from torch import nn

from clipwise import PerExample
from clipwise.audit.trial import run_of
from clipwise.validation import step_guard, step_inputs
from tests.audit.bug import Bug, Subject, losses, rows


def plant(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step_inputs, "require_no_batch_statistics", lambda *_: None)
    patch.setattr(step_guard, "require_no_statistics_in", lambda *_: None)


def normalized(steps: int) -> Subject:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Tanh(), nn.Linear(8, 3))
    return run_of(
        model,
        losses,
        rows(),
        clipping=PerExample(max_norm=0.1, method="loop"),
        sampling="full",
        sample_rate=None,
        steps=steps,
        probe_independence=False,
    )


BUG = Bug(
    "batch norm over the whole batch",
    plant,
    ("neighbours",),
    subject=partial(normalized, 2),
    attacked=partial(normalized, 1),
)
