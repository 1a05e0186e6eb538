"""A model, its private runs, and the ground truth about them."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise import MemoryLedger, PerExample, Private, accounting, make_private
from clipwise.errors import ClipwiseError, PrivacyWarning
from clipwise.privacy import Entry, Event
from clipwise.report.wording import CHANGED_SINCE
from tests.runs import CLASSES, FEATURES, HIDDEN, data

DELTA = 1e-5


class Counts(nn.Module):
    """Sums its inputs in a buffer in training mode: an evaluation without `.eval()` changes the model."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not torch.is_grad_enabled():
            self.total += x.sum()
        return x


@dataclass
class Truth:
    """The ground truth of one private run.

    Attributes:
        releases: the number of gradients that were visible in `.grad` or used in an update.
        weights: whether parameters or buffers depend on private data without noise.
        optimizer: whether the optimizer's state does.
        declared: the user's reasons.
    """

    releases: int = 0
    weights: bool = False
    optimizer: bool = False
    declared: list[str] = field(default_factory=list)

    @property
    def is_tainted(self) -> bool:
        return self.weights or self.optimizer


@dataclass
class Saved:
    """A user's checkpoint, and the ground truth about it."""

    model: dict[str, Any]
    private: dict[str, Any]
    truth: Truth


class World:
    """One model and its current run."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.folder, self.runs = folder, 0
        self.dataset = data(seed=seed)
        self.model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), Counts(), nn.Linear(HIDDEN, CLASSES))
        self.averages = self.random.random() < 0.3
        self.kind = self.random.choice(["sgd", "momentum", "adam", "fused"])
        self.optimizer = self._optimizer()
        self.truth, self.saved = Truth(), list[Saved]()
        self.keeps_file = self.random.random() < 0.5
        self.pieces = self.random.choice([None, None, 3])
        self.private = self._make(self._ledger())
        self.batches: Any = None
        self.problems: list[str] = []
        self.refusals = 0

    # ------------------------------------------------------------ user actions

    def private_step(self) -> None:
        """The documented loop."""
        while True:
            before = self.private.steps
            losses = self._losses(self._batch())
            try:
                is_complete = self.private.step(losses)
            finally:
                self.truth.releases += self.private.steps - before
            if is_complete:
                return

    def backward_and_step(self) -> None:
        """The same with manual optimizer steps, and sometimes an idiom of plain loops in between."""
        idiom = self.random.choice(["none", "none", "clip", "zero", "plain", "twice", "closure"])
        while not self._backward():
            pass
        if idiom == "clip":
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        elif idiom == "zero":
            self.optimizer.zero_grad(set_to_none=self.random.random() < 0.5)
        elif idiom == "plain":
            self._plain_losses().mean().backward()  # type: ignore[no-untyped-call]
            self.truth.weights = self.truth.optimizer = True
        if idiom == "closure":
            self.truth.weights = self.truth.optimizer = True
            self.optimizer.step(self._closure)
        else:
            self.optimizer.step()
        if idiom == "twice":
            self.optimizer.step()

    def backward_only(self) -> None:
        """A release with a later update, or none."""
        self._backward()

    def plain_step(self) -> None:
        """loss.backward(); optimizer.step()."""
        self._plain_gradient()
        self.optimizer.step()
        self.truth.weights = self.truth.optimizer = True
        self._maybe_clear()

    def plain_step_through_data(self) -> None:
        """A manual update through `.data`."""
        self._plain_gradient()
        for p in self.model.parameters():
            if p.grad is not None:
                p.data -= 0.1 * p.grad
        self.truth.weights = True
        self.model.zero_grad()

    def second_optimizer(self) -> None:
        """A step of a second optimizer, sometimes fused, which torch does not count."""
        self._plain_gradient()
        fused = self.random.random() < 0.5
        torch.optim.SGD(self.model.parameters(), lr=0.1, fused=fused).step()
        self.truth.weights = True
        self.model.zero_grad()

    def update_in_the_middle(self) -> None:
        """A change between the draw of a batch and its step."""
        losses = self._losses(self._batch())
        with torch.no_grad():
            for p in self.model.parameters():
                p.data += 0.01 * self.dataset.tensors[0].mean()
        self.truth.weights = True
        before = self.private.steps
        try:
            self.private.step(losses)
        finally:
            self.truth.releases += self.private.steps - before

    def evaluate(self) -> None:
        """An evaluation in .eval(), which changes nothing."""
        self.model.eval()
        with torch.no_grad():
            self.model(self.dataset.tensors[0])
        self.model.train()

    def evaluate_in_train_mode(self) -> None:
        """An evaluation in training mode, which changes a buffer."""
        with torch.no_grad():
            self.model(self.dataset.tensors[0])
        self.truth.weights = True

    def evaluate_averages(self) -> None:
        """Weights that are swapped and restored, by the run or manually."""
        if self.averages:
            with self.private.ema.applied():
                self.private.spent()
        own = copy.deepcopy(self.model.state_dict())
        with torch.no_grad():
            for p in self.model.parameters():
                p.mul_(0.9)
        self.model.load_state_dict(own)

    def schedule(self) -> None:
        """A scheduler that counts steps."""
        torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.9).step()

    def save(self) -> None:
        """A checkpoint: model and run."""
        state = copy.deepcopy(self.private.state_dict())
        self._require(not self.truth.is_tainted, "a checkpoint was made of weights that hold private data")
        self.saved.append(Saved(copy.deepcopy(self.model.state_dict()), state, copy.deepcopy(self.truth)))

    def load(self) -> None:
        """Load an earlier checkpoint of this run, perhaps in the wrong order, or the weights alone."""
        if not self.saved:
            return
        saved = self.random.choice(self.saved)
        how = self.random.choice(["both", "both", "model", "private"])
        if how != "private":
            self.model.load_state_dict(saved.model)
            self.truth.weights = False
        if how != "model":
            self.private.load_state_dict(saved.private)
            is_back = all(torch.equal(t, saved.model[name]) for name, t in self.model.state_dict().items())
            self._require(is_back, "a checkpoint was loaded that is not of the model's weights")
            self.truth.weights = self.truth.optimizer = False  # the optimizer is that of the checkpoint
        self.batches = None

    def freeze(self) -> None:
        """A parameter that is frozen and unfrozen."""
        p = self.random.choice(list(self.model.parameters()))
        p.requires_grad_(not p.requires_grad)

    def fail(self) -> None:
        """An exception in the middle of a batch."""
        try:
            self._losses(self._batch())
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            self.batches = None if self.random.random() < 0.5 else self.batches

    def cast(self) -> None:
        """A cast to another dtype and back: the contents stay."""
        self.model.to(torch.float32)
        self.model.double().float()

    def declare(self) -> None:
        """A declaration, which the test takes as true and the statement must print."""
        reason = self.random.choice(["averaged weights", "statistics from public rows"])
        self.private.declare_update(self.random.choice(["public", "post-processing"]), reason)
        self.truth.weights = self.truth.optimizer = False
        self.truth.declared.append(reason)

    def reopen(self) -> None:
        """Close the run and resume it from a checkpoint."""
        if not self.keeps_file:
            return
        self.save()
        self.private.close()
        last = self.saved[-1]
        self.optimizer = self._optimizer()
        self.private, self.batches = self._make(self.folder / f"ledger{self.runs}"), None
        self.private.load_state_dict(last.private)

    def second_run(self) -> None:
        """Another run on the same model: in the same ledger, or after the first was closed in one of its own.

        Releases of the first run are in the first weights of the second. Its statement says that it takes these for
        public, and counts only its own. Unnoised contents stay so.
        """
        self.model.zero_grad()
        for p in self.model.parameters():
            p.requires_grad_(True)
        if isinstance(self.private._context.ledger, MemoryLedger) and self.random.random() < 0.5:
            self.optimizer, self.truth.optimizer = self._optimizer(), False
            self.private, self.batches = self._make(self.private._context.ledger), None
            return  # the ledger and the state of the model are those of both
        with self.refusing():
            was_closed = self.private._context.weights.is_closed
            self.private.close()
            is_clean = was_closed or not self.truth.is_tainted
            self._require(is_clean, "a run was closed with weights that hold private data")
        self.runs += 1
        is_new = self.random.random() < 0.5
        self.optimizer = self._optimizer() if is_new else self.optimizer
        # After a run that released nothing and was closed in order it is as before any run: make_private takes the
        # first weights as public.
        counts = self.private.steps > 0 or self.private._context.weights.unverified is not None
        self.truth = Truth(
            weights=self.truth.weights and counts, optimizer=self.truth.optimizer and counts and not is_new
        )
        self.saved = []
        self.private, self.batches = self._make(self._ledger()), None

    # --------------------------------------------------------------- checks

    def judge(self) -> None:
        """Require an error, or a statement that is true of the weights."""
        with self.refusing():
            spent = self.private.spent(DELTA)
            self._require(spent.steps >= self.truth.releases, "spent() counts too few releases")
        with self.refusing():
            statement = self.private.statement()
            text = str(statement)
            is_verified = CHANGED_SINCE not in text
            self._require(
                not (is_verified and self.truth.is_tainted), "a statement was made of weights that hold private data"
            )
            self._require(statement.spent.steps >= self.truth.releases, "the statement counts too few releases")
            epsilon = _epsilon_of(self.truth.releases, self.private)
            self._require(statement.spent.epsilon >= epsilon * (1 - 1e-9), "the statement is below the truth")
            self._require(all(reason in text for reason in self.truth.declared), "a declaration is not printed")

    def end(self) -> None:
        """Require the same at the end, and after the run is closed."""
        self.judge()
        if not self.private._context.weights.is_closed:
            with self.refusing():
                self.private.close()
                is_clean = not self.truth.is_tainted
                self._require(is_clean, "a run was closed with weights that hold private data")
            self.judge()

    @contextmanager
    def refusing(self) -> Any:
        """Accept an error in place of a true statement."""
        try:
            yield
        except ClipwiseError:
            self.refusals += 1

    def _require(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)

    # ---------------------------------------------------------------------- helpers

    def _make(self, ledger: Any) -> Private:
        return make_private(
            self.model,
            self.optimizer,
            self.dataset,
            clipping=PerExample(max_norm=1.0),
            batch_size=8,
            noise_multiplier=1.0,
            delta=DELTA,
            sampling="fixed-size",
            ledger=ledger,
            ema=0.5 if self.averages else None,
            max_physical_batch_size=self.pieces,
        )

    def _ledger(self) -> Any:
        return self.folder / f"ledger{self.runs}" if self.keeps_file else MemoryLedger()

    def _optimizer(self) -> torch.optim.Optimizer:
        kind, parameters = self.kind, list(self.model.parameters())
        if kind == "adam":
            return torch.optim.Adam(parameters, lr=0.01)
        momentum = 0.9 if kind == "momentum" else 0.0
        return torch.optim.SGD(parameters, lr=0.1, momentum=momentum, fused=kind == "fused" or None)

    def _batch(self) -> Any:
        for _ in range(2):
            if self.batches is None:
                self.batches = iter(self.private.loader.pieces())
            batch = next(self.batches, None)
            if batch is not None:
                return batch
            self.batches = None
        raise AssertionError("the loader is empty")

    def _losses(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x), y, reduction="none")

    def _plain_losses(self) -> Tensor:
        return self._losses([t[:8] for t in self.dataset.tensors])

    def _plain_gradient(self) -> None:
        self.model.zero_grad()
        self._plain_losses().mean().backward()  # type: ignore[no-untyped-call]

    def _closure(self) -> float:
        self._plain_gradient()
        return 0.0

    def _backward(self) -> bool:
        before = self.private.steps
        losses = self._losses(self._batch())
        try:
            return self.private.backward(losses)
        finally:
            self.truth.releases += self.private.steps - before

    def _maybe_clear(self) -> None:
        if self.random.random() < 0.7:
            self.optimizer.zero_grad()


def _epsilon_of(releases: int, private: Private) -> float:
    return _epsilon(private._context.event, releases) if releases else 0.0


@cache
def _epsilon(event: Event, releases: int) -> float:
    return accounting.epsilon_of([Entry(event, releases)], DELTA)


def silently(act: Callable[[], None]) -> None:
    """Ignore warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        warnings.simplefilter("ignore", UserWarning)
        act()
