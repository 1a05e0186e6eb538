"""Observes one private run: shared by all audits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from clipwise.engine.observer import Observer, observing
from clipwise.errors import AuditError

if TYPE_CHECKING:
    from clipwise.engine.context import StepContext

MakeRun = Callable[[Any], Any]  # trains on a data set


class RunWatch(Observer):
    """Observes a single run; `run` is that run, once it exists."""

    run: StepContext | None = None

    def follow(self, run: StepContext) -> None:
        """For `begins`: remember the run, and refuse a second one."""
        if self.run is not None:
            raise AuditError("make_run made several private runs: audit one at a time.")
        self.run = run


def train(make_run: MakeRun, dataset: Any, watch: RunWatch, seed: int) -> StepContext:
    """Train once under a watch, with torch's generator seeded, and return the run."""
    with torch.random.fork_rng(devices=[]), observing(watch):
        torch.manual_seed(seed)
        make_run(dataset)
    if watch.run is None:
        raise AuditError(
            "make_run made no private run: it must call clipwise.make_private on the data set it is given."
        )
    return watch.run
