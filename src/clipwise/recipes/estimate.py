"""`clipwise train --dry-run`: what a run would do and cost. It reads no record and writes nothing."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from clipwise.accounting import epsilon_of
from clipwise.clipping import PerExample
from clipwise.engine.make_private import make_private
from clipwise.recipes.building import batch_loss, device_of, make_optimizer
from clipwise.recipes.counts import NoisedCounts
from clipwise.recipes.kind import ASSUMED_LABELS, Encoder, Settings
from clipwise.recipes.planning import RunPlan
from clipwise.recipes.train import PHYSICAL_BATCH

_STEPS = 3  # of which the first one is not timed


@dataclass(frozen=True)
class Estimate:
    """The plan of a run as lines, and as JSON types."""

    lines: tuple[tuple[str, str], ...]
    values: Mapping[str, Any]


def estimate(plan: RunPlan) -> Estimate:
    """Describe a planned run, with time and memory of a step on synthetic rows."""
    settings = plan.settings
    values: dict[str, Any] = {
        "rows": len(plan.source),
        "training_rows": len(plan.training_rows),
        "held_out_rows": len(plan.held_out_rows),
        "data": plan.source.description,
        "model": settings.model,
        "batch_size": settings.batch_size,
        "epochs": settings.epochs,
        "steps": plan.steps,
    }
    lines = [
        ("data", plan.source.description),
        ("rows", f"{values['training_rows']} for training, {values['held_out_rows']} held out, by position"),
        ("training", f"{plan.steps} steps, {settings.epochs:g} epochs, expected batch size {settings.batch_size}"),
        (
            "optimizer",
            f"{settings.optimizer}, learning rate {settings.learning_rate:g}, max norm {settings.max_norm:g}",
        ),
        *_privacy(plan, values),
    ]
    with torch.random.fork_rng(devices=[]):
        lines += _about_model(plan, values)
    return Estimate(tuple(lines), values)


def _about_model(plan: RunPlan, values: dict[str, Any]) -> list[tuple[str, str]]:
    settings, encoder, bound = plan.settings, _encoder(plan), ""
    if plan.source.needs_counts():
        bound = f" at most, with up to {len(ASSUMED_LABELS)} labels: noised counts decide"
    if encoder is None:
        return [("model", f"{settings.model}; its size follows from the noised counts")]
    model = encoder.model(settings.model).to(device_of(plan.choices))
    values["parameters"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    about = ("model", f"{settings.model}, {values['parameters']} parameters{bound}")
    return [about, *_time_and_memory(plan, encoder, model, values)]


def _privacy(plan: RunPlan, values: dict[str, Any]) -> list[tuple[str, str]]:
    if plan.event is None:
        return [("privacy", "none: the weights may reveal any training record")]
    spent = epsilon_of(plan.releases(), plan.delta)
    values |= {"epsilon": spent, "delta": plan.delta, "noise_multiplier": plan.event.noise_multiplier}
    lines = [
        ("privacy", f"epsilon {spent:.4g} of {plan.epsilon:g} at delta {plan.delta:g}, zero-out of one record"),
        ("noise", f"multiplier {plan.event.noise_multiplier:.4g}, sampling rate {plan.event.sample_rate:.4g}"),
    ]
    if plan.counts is not None:
        share, z = plan.settings.counts_share, plan.counts.noise_multiplier
        values |= {"counts_share": share, "counts_noise_multiplier": z}
        lines.append(
            ("counts", f"{share:.0%} of the budget, noise multiplier {z:.4g}: what is not declared is counted")
        )
    if plan.evaluation is not None:
        z = plan.evaluation.noise_multiplier
        values["evaluation_noise_multiplier"] = z
        lines.append(("evaluation", f"noise of standard deviation {z:.3g} on the number of correct held-out rows"))
    return lines


def _encoder(plan: RunPlan) -> Encoder | None:
    if plan.source.needs_counts():
        noise = 0.0 if plan.counts is None else plan.counts.noise_multiplier
        found = plan.source.largest(len(plan.training_rows), NoisedCounts(noise, lambda _: None))
        return None if found is None else found.for_model(plan.settings.model)
    return plan.source.prepare(plan.training_rows[:0], None).for_model(plan.settings.model)


def _time_and_memory(
    plan: RunPlan, encoder: Encoder, model: nn.Module, values: dict[str, Any]
) -> list[tuple[str, str]]:
    settings = plan.settings
    data = encoder.synthetic(min(settings.batch_size, len(plan.training_rows)))
    if data is None:
        return [("time", "not estimated for this kind of data")]
    seconds, megabytes = _timed(settings, encoder, model, data, device_of(plan.choices))
    values |= {"seconds_per_step": seconds, "seconds": seconds * plan.steps, "megabytes": megabytes}
    total = seconds * plan.steps
    took = f"{total:.0f} s" if total < 120 else f"{total / 60:.0f} min"
    return [
        ("time", f"about {took}: {_duration(seconds)} for a step on synthetic rows"),
        ("memory", f"about {megabytes:.0f} MB of {'GPU' if next(model.parameters()).is_cuda else 'main'} memory"),
    ]


def _duration(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def _timed(
    settings: Settings, encoder: Encoder, model: nn.Module, data: TensorDataset, device: torch.device
) -> tuple[float, float]:
    """Seconds of a step, and the peak of memory in megabytes, on synthetic rows that are all in each batch."""
    loss = batch_loss(encoder, model)
    best = float("inf")
    with make_private(
        model,
        make_optimizer(model, settings),
        data,
        clipping=PerExample(max_norm=settings.max_norm),
        sampling="full",
        steps=_STEPS,
        noise_multiplier=1.0,
        max_physical_batch_size=max(1, PHYSICAL_BATCH // settings.views),
        augmentation=encoder.views(settings.views),
        loss=loss,
    ) as private:
        model.train()
        for _ in range(_STEPS):
            begun = time.perf_counter()
            for batch in private.loader.pieces():
                if private.step(loss(*(value.to(device) for value in batch))):
                    break
            if device.type == "cuda":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - begun)
    if device.type == "cuda":
        return best, torch.cuda.max_memory_allocated() / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return best, peak / (1e6 if sys.platform == "darwin" else 1e3)
