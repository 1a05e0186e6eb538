"""Train one setting; return its accuracy and privacy cost."""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipwise
from clipwise import layers
from clipwise.engine import checkpoint
from clipwise.errors import CheckpointError, ClipwiseError, PrivacyWarning
from clipwise.privacy import Part
from experiments import models
from experiments.batch_clipping import strategies
from experiments.batch_clipping.pictures import Pictures, pictures
from experiments.batch_clipping.setting import Setting
from experiments.harness.environment import device_of
from experiments.harness.limits import Deadline, OutOfTimeError, reading_data
from experiments.harness.paper import Options, Task
from experiments.harness.training import losses_of

DELTA = 1e-5
_ROWS = 500  # batch size of evaluation
_KEEP_AFTER = 10.0  # seconds between checkpoints of an unfinished run


def train_task(task: Task, options: Options, deadline: Deadline, unfinished: Path) -> dict[str, Any]:
    """A run on the data set of its setting. It continues from the checkpoint of an earlier try, if there is one."""
    setting = task.setting
    assert isinstance(setting, Setting)
    with reading_data():
        images = _loaded(setting.data, options.data, device_of(options.device), task.judged_by)
    kept = unfinished / f"{hashlib.sha256(task.key.encode()).hexdigest()[:20]}.pt"
    return train(setting, images, task.seed, deadline, kept)


def train(
    setting: Setting, pictures: Pictures, seed: int, deadline: Deadline, kept: Path | None = None
) -> dict[str, Any]:
    """One run: accuracy on the evaluation part, read once; accuracy on the public part after each epoch.

    The seed determines only the initial weights. It is published, so noise, batches and crops do not come from it.

    Args:
        kept: the checkpoint file of an unfinished run, written at the end of an epoch. A stopped run continues from
            the last finished epoch; the later steps were not released.
    """
    device = pictures.private.tensors[0].device
    # The search for the fastest convolution pays where shapes repeat.
    torch.backends.cudnn.benchmark = setting.sampling == "fixed-size"
    torch.manual_seed(seed)
    model = models.build(setting.model, norm=setting.norm, image_channels=pictures.look.channels).to(device)
    if device.type == "cuda" and setting.clip != "example":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # as tensor cores take images
    earlier = _earlier(kept)
    if earlier:
        model.load_state_dict(earlier["model"])
    trainer = _Openly(setting, model, pictures) if not setting.is_private else _Privately(setting, model, pictures)
    progress = _Progress(**earlier["progress"]) if earlier else _Progress()
    if earlier:
        trainer.load_state_dict(earlier["trainer"])
    last_kept = start = time.perf_counter()
    before = progress.seconds
    try:
        while len(progress.curve) < setting.epochs:
            began = time.perf_counter()
            model.train()
            trainer.epoch(deadline)
            trainer.decay()
            progress.curve.append(round(_accuracy(model, pictures, pictures.public), 4))
            if setting.watches_norms:
                progress.norms.append(_norms(model, pictures, setting.batch_size))
            now = time.perf_counter()
            progress.seconds = before + now - start
            # The next epoch takes about as long as this one. Stop if there is not enough time.
            is_late = len(progress.curve) < setting.epochs and deadline.left() < now - began
            if kept is not None and (is_late or now - last_kept > _KEEP_AFTER):
                state = {"model": model.state_dict(), "trainer": trainer.state_dict(), "progress": vars(progress)}
                checkpoint.save(kept, state)
                last_kept = now
            if is_late:
                raise OutOfTimeError
    except OutOfTimeError:
        raise OutOfTimeError(progress.in_words()) from None
    trainer.settle()
    result = {
        "accuracy": _accuracy(model, pictures, pictures.held_out),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    result |= progress.in_words() | trainer.cost()
    if kept is not None:
        kept.unlink(missing_ok=True)
    return result


@dataclass
class _Progress:
    """The values that a run reports so far."""

    curve: list[float] = field(default_factory=list)
    norms: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0

    def in_words(self) -> dict[str, Any]:
        """In the form of results."""
        found = {"public_accuracy_by_epoch": self.curve, "seconds": round(self.seconds, 1)}
        return found | ({"norms_by_epoch": self.norms} if self.norms else {})


@lru_cache(maxsize=2)
def _loaded(name: str, folder: Path | None, device: torch.device, judged_by: str) -> Pictures:
    return pictures(name, folder, device, judged_by=judged_by)


def _earlier(kept: Path | None) -> dict[str, Any]:
    """The checkpoint of an earlier try; empty if it cannot be read."""
    if kept is None or not kept.exists():
        return {}
    try:
        return checkpoint.load(kept)
    except CheckpointError:
        return {}


class _Openly:
    """Mini-batch SGD on shuffled batches, without privacy."""

    def __init__(self, setting: Setting, model: nn.Module, pictures: Pictures) -> None:
        self._setting, self._model, self._pictures = setting, model, pictures
        self._views = pictures.views(setting.views, setting.augmented, setting.flipped)
        self._optimizer = _optimizer(setting, model)

    def epoch(self, deadline: Deadline) -> None:
        """One pass over all records."""
        x, y = self._pictures.private.tensors
        for rows in _pieces(torch.randperm(len(x)).to(x.device), self._setting.batch_size):
            if len(rows) > 1:  # batch norm needs two rows
                deadline.require()
                self._optimizer.zero_grad()
                self._losses(*self._ready(x[rows], y[rows])).mean().backward()  # type: ignore[no-untyped-call]
                self._optimizer.step()

    def decay(self) -> None:
        """Decay the learning rate for the next epoch."""
        for group in self._optimizer.param_groups:
            group["lr"] *= self._setting.decay

    def settle(self) -> None:
        """Nothing is left to do."""

    def state_dict(self) -> dict[str, Any]:
        """The state to continue from, without the model."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        self._optimizer.load_state_dict(state)

    def cost(self) -> dict[str, Any]:
        """No privacy."""
        return {"epsilon": None, "why_no_epsilon": "no privacy"}

    def _ready(self, x_BCHW: Tensor, y_B: Tensor) -> tuple[Tensor, Tensor]:
        """Random views, standardised: [B, K, C, H, W], with the label of each example."""
        views_KCHW = self._pictures.look.standardised(self._views.of(x_BCHW))
        return views_KCHW.view(len(y_B), self._views.count, *views_KCHW.shape[1:]), y_B

    def _losses(self, x_BKCHW: Tensor, y_B: Tensor) -> Tensor:
        """One loss per example, the mean over its views. It draws no random numbers, so it can be captured."""
        views = self._views
        return views.mean(losses_of(self._model, x_BKCHW.flatten(0, 1), views.labels(y_B)))


class _Privately(_Openly):
    """Private training with the fastest step of the strategy on the device.

    That is a captured step, except for batch clipping in batches of random size.
    """

    def __init__(self, setting: Setting, model: nn.Module, pictures: Pictures) -> None:
        if setting.norm == "batch":
            layers.without_running_statistics(model)
        super().__init__(setting, model, pictures)
        budget: dict[str, Any] = {"epsilon": setting.epsilon, "delta": DELTA, "epochs": setting.epochs}
        if setting.sigma is not None:
            budget = {"noise_multiplier": strategies.joint_multiplier(setting, model), "delta": DELTA}
        self._private = clipwise.make_private(
            model,
            self._optimizer,
            pictures.private,
            clipping=strategies.strategy(setting, pictures),
            batch_size=setting.batch_size,
            sampling=setting.sampling,
            **budget,
        )
        if setting.noise_rate is not None:
            # The noise of an update on a weight is a scale on which strategies compare.
            rate = setting.noise_rate / _noise(self._private.parts(), setting.divisor, model)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
        if setting.local_rate is None:
            self._step = self._private.compiled(self._losses)

    def epoch(self, deadline: Deadline) -> None:
        """The steps of an epoch."""
        for x, y in self._private.loader.pieces():
            deadline.require()
            ready, labels = self._ready(x, y)
            if self._setting.local_rate is not None:
                self._private.step_local_update((ready.flatten(0, 1), self._views.labels(labels)))
                continue
            self._step(ready, labels)

    def settle(self) -> None:
        """Set batch norm statistics for evaluation from public images."""
        if self._setting.norm == "batch":
            size = max(2, self._setting.batch_size // self._setting.microbatches)
            batches = _pieces(self._pictures.public.tensors[0], size)
            layers.recompute_statistics(self._model, map(self._pictures.centred, batches))
            self._private.declare_update("public", "statistics of batch norm from public images")

    def state_dict(self) -> dict[str, Any]:
        """The state to continue from, without the model and without secrets."""
        return self._private.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state and the history, with a fresh secret."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)
            self._private.load_state_dict(state)

    def cost(self) -> dict[str, Any]:
        """The privacy spent, by PLD."""
        with self._private as private:
            found = {"noise_multiplier": private.noise_multiplier, "parts": len(private.parts())}
            found |= {"steps": private.steps, "delta": DELTA, "learning_rate_at_last": self._rate()}
            try:
                spent = private.spent()
            except ClipwiseError as error:
                return found | {"epsilon": None, "why_no_epsilon": str(error)}
            return found | {"epsilon": spent.epsilon, "adjacency": str(spent.adjacency), "in_words": str(spent)}

    def _rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])


def _optimizer(setting: Setting, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), setting.learning_rate, momentum=setting.momentum)


def _pieces(rows: Tensor, size: int) -> tuple[Tensor, ...]:
    return rows.split(size)  # type: ignore[no-untyped-call, no-any-return]


def _noise(parts: list[Part], divisor: float, model: nn.Module) -> float:
    """The root mean square over coordinates of the standard deviation of the noise on the gradient."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    square = 0.0
    for part in parts:
        scales = part.scales or (1.0,) * len(part.parameters)
        square += sum((part.noise_std / m) ** 2 * sizes[n] for n, m in zip(part.parameters, scales, strict=True))
    return math.sqrt(square / sum(sizes.values())) / divisor


@torch.no_grad()
def _accuracy(model: nn.Module, pictures: Pictures, dataset: TensorDataset) -> float:
    """The share of correctly classified images. Batch norm without running statistics uses those of 500 rows."""
    model.eval()
    x, y = dataset.tensors
    found = torch.cat([model(pictures.centred(some)).argmax(1) for some in _pieces(x, _ROWS)])
    return float((found == y).double().mean())


def _norms(model: nn.Module, pictures: Pictures, size: int) -> dict[str, float]:
    """The norm of each tensor's mean gradient, averaged over public microbatches."""
    was_training = model.training
    model.train()
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    x, y = pictures.public.tensors
    names = [name for name, _ in model.named_parameters()]
    sums = dict.fromkeys(names, 0.0)
    batches = list(zip(_pieces(x, size), _pieces(y, size), strict=True))[: max(1, len(x) // size)]
    for some_x, some_y in batches:
        loss = losses_of(model, pictures.centred(some_x), some_y).mean()
        for name, gradient in zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            sums[name] += float(gradient.norm())
    for name, buffer in model.named_buffers():
        buffer.copy_(kept[name])
    model.train(was_training)
    return {name: round(total / len(batches), 6) for name, total in sums.items()}
