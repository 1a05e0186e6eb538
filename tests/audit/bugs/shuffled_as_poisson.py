"""Shuffled epochs are charged as Poisson sampling, although every record takes part with certainty."""

from functools import partial

import numpy as np
import pytest
from torch import nn

from clipwise import PerExample
from clipwise.audit.trial import run_of
from clipwise.sampling.base import Indices
from clipwise.sampling.schemes import Poisson, epoch_order
from tests.audit.bug import Bug, Subject, losses, rows, small


def plant(patch: pytest.MonkeyPatch) -> None:
    def of_epoch(self: Poisson, step_secret: bytes, epoch_secret: bytes, slot: int) -> Indices:
        return np.sort(np.array_split(epoch_order(epoch_secret, self.dataset_size), self.steps_per_epoch)[slot])

    patch.setattr(Poisson, "draw", of_epoch)


def one_epoch() -> Subject:
    """Four steps of a tiny model, with little noise: a record that is never drawn cannot be detected."""
    return run_of(
        nn.Linear(2, 2, bias=False),
        losses,
        rows(8, features=2, classes=2),
        clipping=PerExample(max_norm=1.0, method="vmap"),
        sample_rate=0.25,
        steps=4,
        noise_multiplier=0.15,
        probe_independence=False,
    )


BUG = Bug(
    "shuffled counted as Poisson",
    plant,
    ("neighbours", "canary"),
    subject=partial(small, sample_rate=0.25, steps=8),
    attacked=one_epoch,
    canary={"runs": 50},
)
