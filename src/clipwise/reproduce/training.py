"""Train one setting, and say what came out and what it cost."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipwise
from clipwise import layers, models
from clipwise.bench.limits import Deadline
from clipwise.errors import ClipwiseError
from clipwise.privacy import Part
from clipwise.reproduce import strategies
from clipwise.reproduce.pictures import Pictures
from clipwise.reproduce.setting import Setting

DELTA = 1e-5
_ROWS = 500  # that go through a model at a time, where nothing is trained


class OutOfTimeError(Exception):
    """The time for the whole command is up in the middle of a run, which leaves no result."""


def train(setting: Setting, pictures: Pictures, seed: int, deadline: Deadline) -> dict[str, Any]:
    """One run: accuracy on the part that it is judged by, read once; accuracy on the public part after each epoch.

    The seed is of the first weights only. It is published, so noise, batches and crops do not come from it.
    """
    device = pictures.private.tensors[0].device
    torch.manual_seed(seed)
    model = models.build(setting.model, norm=setting.norm, image_channels=pictures.look.channels).to(device)
    trainer = (
        _Openly(setting, model, pictures) if not setting.is_private else _Privately(setting, model, pictures)
    )
    curve, norms, start = [], [], time.perf_counter()
    for _ in range(setting.epochs):
        model.train()
        trainer.epoch(deadline)
        trainer.decay()
        curve.append(round(_accuracy(model, pictures, pictures.public), 4))
        if setting.watches_norms:
            norms.append(_norms(model, pictures, setting.batch_size))
    trainer.settle()
    result = {
        "accuracy": _accuracy(model, pictures, pictures.held_out),
        "public_accuracy_by_epoch": curve,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": round(time.perf_counter() - start, 1),
    }
    return result | trainer.cost() | ({"norms_by_epoch": norms} if norms else {})


class _Openly:
    """Mini-batch SGD on shuffled batches, without privacy."""

    def __init__(self, setting: Setting, model: nn.Module, pictures: Pictures) -> None:
        self._setting, self._model, self._pictures = setting, model, pictures
        self._views = pictures.views(setting.views, setting.augmented)
        self._optimizer = _optimizer(setting, model)

    def epoch(self, deadline: Deadline) -> None:
        """Every record once."""
        x, y = self._pictures.private.tensors
        for rows in _pieces(torch.randperm(len(x)).to(x.device), self._setting.batch_size):
            if len(rows) > 1:  # batch norm cannot take one
                _require_time(deadline)
                self._optimizer.zero_grad()
                self._losses(x[rows], y[rows]).mean().backward()  # type: ignore[no-untyped-call]
                self._optimizer.step()

    def decay(self) -> None:
        """The next epoch has a smaller rate."""
        for group in self._optimizer.param_groups:
            group["lr"] *= self._setting.decay

    def settle(self) -> None:
        """Nothing is left to do."""

    def cost(self) -> dict[str, Any]:
        """No privacy at all."""
        return {"epsilon": None, "why_no_epsilon": "no privacy"}

    def _losses(self, x: Tensor, y: Tensor) -> Tensor:
        views = self._views
        return views.mean(
            strategies.losses(self._model, self._pictures.look.standardised(views.of(x)), views.labels(y))
        )


class _Privately(_Openly):
    """The same by the engine."""

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
            # A scale on which strategies compare: what an update does to a weight by noise alone.
            rate = setting.noise_rate / _noise(self._private.parts(), setting.divisor, model)
            for group in self._optimizer.param_groups:
                group["lr"] = rate

    def epoch(self, deadline: Deadline) -> None:
        """The steps of an epoch."""
        for x, y in self._private.loader:
            _require_time(deadline)
            if self._setting.local_rate is None:
                self._private.step(self._losses(x, y))
            else:
                views = self._views
                self._private.step_sets((self._pictures.look.standardised(views.of(x)), views.labels(y)))

    def settle(self) -> None:
        """Statistics of batch norm, for evaluation, from public images."""
        if self._setting.norm == "batch":
            size = max(2, self._setting.batch_size // self._setting.mini_sets)
            batches = _pieces(self._pictures.public.tensors[0], size)
            layers.recompute_statistics(self._model, map(self._pictures.centred, batches))

    def cost(self) -> dict[str, Any]:
        """What was spent, by PLD."""
        with self._private as private:
            found = {"noise_multiplier": private.noise_multiplier, "parts": len(private.parts())}
            found |= {"steps": private.steps, "delta": DELTA, "learning_rate_at_last": self._rate()}
            try:
                spent = private.spent()
            except ClipwiseError as error:
                return found | {"epsilon": None, "why_no_epsilon": str(error)}
            return found | {
                "epsilon": spent.epsilon,
                "adjacency": str(spent.adjacency),
                "in_words": str(spent),
            }

    def _rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])


def _optimizer(setting: Setting, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), setting.learning_rate, momentum=setting.momentum)


def _pieces(rows: Tensor, size: int) -> tuple[Tensor, ...]:
    return rows.split(size)  # type: ignore[no-untyped-call, no-any-return]


def _require_time(deadline: Deadline) -> None:
    if deadline.left() <= 0:
        raise OutOfTimeError


def _noise(parts: list[Part], divisor: float, model: nn.Module) -> float:
    """The root mean square, over coordinates, of the noise's standard deviation on the gradient."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    square = 0.0
    for part in parts:
        scales = part.scales or (1.0,) * len(part.parameters)
        square += sum(
            (part.noise_std / m) ** 2 * sizes[n] for n, m in zip(part.parameters, scales, strict=True)
        )
    return math.sqrt(square / sum(sizes.values())) / divisor


@torch.no_grad()
def _accuracy(model: nn.Module, pictures: Pictures, dataset: TensorDataset) -> float:
    """The share of images whose class is found. Without statistics of its own, batch norm takes those of 500 rows."""
    model.eval()
    x, y = dataset.tensors
    found = torch.cat([model(pictures.centred(some)).argmax(1) for some in _pieces(x, _ROWS)])
    return float((found == y).double().mean())


def _norms(model: nn.Module, pictures: Pictures, size: int) -> dict[str, float]:
    """The norm of each tensor's mean gradient, on average over public mini-sets."""
    was_training = model.training
    model.train()
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    x, y = pictures.public.tensors
    names = [name for name, _ in model.named_parameters()]
    sums = dict.fromkeys(names, 0.0)
    batches = list(zip(_pieces(x, size), _pieces(y, size), strict=True))[: max(1, len(x) // size)]
    for some_x, some_y in batches:
        loss = strategies.losses(model, pictures.centred(some_x), some_y).mean()
        for name, gradient in zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            sums[name] += float(gradient.norm())
    for name, buffer in model.named_buffers():
        buffer.copy_(kept[name])
    model.train(was_training)
    return {name: round(total / len(batches), 6) for name, total in sums.items()}
