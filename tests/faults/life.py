"""The run for fault injection. It logs, unbuffered, everything that is visible.

A run may consist of two processes: the first has the fault, the second continues from the last good
checkpoint or, if there is none, as a new run in the same ledger.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from clipwise import ClipwiseError, FileLedger, PerExample, make_private
from clipwise.engine import checkpoint, step
from clipwise.engine.context import StepContext
from clipwise.errors import PrivacyWarning
from tests.faults.plan import COMPARED, SAVE_EVERY, STEPS, STEPS_AFTER, Plan
from tests.soundness.crash_child import Files, TearableSGD

ATTEMPTS = 4  # of a user to continue the epoch after an error
EXAMPLES, FEATURES, CLASSES = 20, 3, 2

# Errors that users may see. Any other is a crash.
EXPECTED = (ClipwiseError, KeyboardInterrupt, OSError, torch.OutOfMemoryError)


class Run:
    """A model, its private run, and the log file."""

    def __init__(self, plan: Plan, files: Files, *, join: bool = False, dataset: Dataset[Any] | None = None) -> None:
        self.plan, self.files = plan, files
        torch.manual_seed(0)
        self.model = nn.Linear(FEATURES, CLASSES)
        self.private = make_private(
            self.model,
            _Watched(self.model.parameters(), lr=0.1, files=files),
            records() if dataset is None else dataset,
            clipping=PerExample(1.0),
            batch_size=5,
            sampling=plan.sampling,
            noise_multiplier=1.0,
            max_physical_batch_size=plan.physical,
            seed=0 if plan.kind in COMPARED else None,
            num_workers=1 if plan.kind == "worker crash" else 0,
            ledger=FileLedger(files.ledger, join=join, block=plan.block),
            resume_file=files.ledger.with_suffix(".resume"),
        )
        step.noised = self._watched(step.noised)
        self.step = self.private.compiled(self.loss) if plan.is_compiled else self._ordinary
        files.say(f"opened {self.private.steps}")

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y, reduction="none")

    def _ordinary(self, x: Tensor, y: Tensor) -> bool:
        return self.private.step(self.loss(x, y))

    def _watched(self, noised: Callable[..., Any]) -> Callable[..., Any]:
        """Log each pair of noise key and sum."""

        def watched(context: StepContext, total: dict[str, Tensor]) -> Any:
            if context is self.private._context:
                summed = json.dumps([t.tolist() for t in total.values()]).encode()
                key = context.keys.key.derive("test")
                self.files.say(f"key {key.hex()[:16]} {blake2b(summed, digest_size=8).hexdigest()}")
            return noised(context, total)

        return watched

    def train(self, steps: int) -> None:
        """Train for a number of updates, with regular checkpoints."""
        done = 0
        while done < steps:
            for batch in self.private.loader.pieces():
                if not self.step(*batch):
                    continue
                self.files.say("update")
                done += 1
                if done % SAVE_EVERY == 0:
                    self.save()
                if done == steps:
                    return

    def save(self) -> None:
        state = {"model": self.model.state_dict(), "private": self.private.state_dict()}
        self.files.say(f"saving {self.private.steps}")
        checkpoint.save(self.files.checkpoint, state)
        self.files.say(f"saved {self.private.steps}")

    def train_stubbornly(self, steps: int) -> None:
        """Continue the epoch after each error, until it is done or the run refuses."""
        before = self.files.said().count("update")
        for _ in range(ATTEMPTS):
            try:
                return self.train(steps - (self.files.said().count("update") - before))
            except (*EXPECTED, RuntimeError) as error:
                # Torch reports a dead worker from a signal handler, at any line of the run.
                if isinstance(error, EXPECTED) or "DataLoader worker" in str(error):
                    self.files.say(f"caught {type(error).__name__}")
                    self.private.optimizer.zero_grad()
                else:
                    raise
        self.files.say("gave up")

    def close(self) -> None:
        try:
            self.private.close()
            self.files.say("closed")
        except EXPECTED as error:
            self.files.say(f"caught {type(error).__name__}")
        self.files.say("weights " + json.dumps([p.tolist() for p in self.model.parameters()]))


class _Watched(TearableSGD):
    """Logs when an update becomes visible."""

    def __init__(self, *arguments: Any, files: Files, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.files = files

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.files.say("touch")
        super().step(closure)


def records() -> TensorDataset:
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(EXAMPLES, FEATURES, generator=dice)
    return TensorDataset(x, torch.randint(0, CLASSES, (EXAMPLES,), generator=dice))


def first_life(run: Run) -> None:
    run.train_stubbornly(STEPS)
    run.close()


def second_life(plan: Plan, files: Files) -> None:
    saved = files.checkpoint.exists()
    run = Run(plan, files, join=not saved)
    if saved:
        state = checkpoint.load(files.checkpoint)
        run.model.load_state_dict(state["model"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)
            run.private.load_state_dict(state["private"])
    run.train(STEPS_AFTER)
    run.close()


def make_visible(files: Files) -> Callable[[str], None]:
    """Log at every point before any fault: from "step.before-grad" on a release is visible."""

    def visible(point: str) -> None:
        if point == "step.before-grad":
            files.say("release")

    return visible
