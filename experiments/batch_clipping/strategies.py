"""The strategy of a setting, and its noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from clipwise.clipping.base import Strategy
from clipwise.clipping.batch import Batch
from clipwise.clipping.contrib.decay import NormDecay
from clipwise.clipping.contrib.policies import Adaptive, ByNorm, Multipliers
from clipwise.clipping.contrib.random_layer import RandomLayer
from clipwise.clipping.contrib.sparse import Sparse
from clipwise.clipping.per_example import PerExample
from clipwise.clipping.public import PublicData
from clipwise.clipping.thresholds import Groups, Policy, group_parameters
from experiments.batch_clipping.pictures import Pictures
from experiments.batch_clipping.setting import GROUPS, Setting
from experiments.harness.training import losses_of

LOCAL_MOMENTUM, LOCAL_STEPS = 0.9, 4


def strategy(setting: Setting, pictures: Pictures) -> Strategy:
    """The strategy of a private setting."""
    max_norm: Any = setting.max_norm
    if setting.norm_decay != 1:
        max_norm = NormDecay(setting.max_norm, setting.norm_decay)
    options = {"max_norm": max_norm, "parts": _parts(setting, pictures), "split": setting.split}
    if setting.sparse_from is not None:
        steps = -(-len(pictures.private) // setting.batch_size)  # of an epoch
        options["sparse"] = Sparse(every="epoch", after=setting.sparse_from * steps)
    if setting.clip == "example":
        return PerExample(**options)
    update = None if setting.local_rate is None else _local_update(setting.local_rate)
    return Batch(microbatches=setting.microbatches, local_update=update, **options)


def joint_multiplier(setting: Setting, model: nn.Module) -> float:
    """z = sigma / sqrt(L) for L parts with noise 2 C_h sigma each, from the same sample.

    If a unit affects only one part, z = sigma.
    """
    assert setting.sigma is not None
    return setting.sigma / math.sqrt(number_of_parts(setting, model))


def number_of_parts(setting: Setting, model: nn.Module) -> int:
    """L: the number of parts that one unit affects."""
    if setting.parts in ("layerwise", "enhanced", "zhang"):
        return len(group_parameters(setting.layers, dict(model.named_parameters())))
    return GROUPS if setting.parts == "groups" else 1


def _parts(setting: Setting, pictures: Pictures) -> Groups | Policy:
    if setting.parts == "all":
        return "all"
    if setting.parts == "layerwise":
        return setting.layers
    if setting.parts == "random-layer":
        return RandomLayer(groups=setting.layers)
    public = PublicData(
        pictures.public, lambda model, x, y: losses_of(model, pictures.centred(x), y), name=f"a tenth of {setting.data}"
    )
    # With batch norm there are no per-example gradients, so norms are measured over microbatches.
    size = setting.batch_size // setting.microbatches
    question: dict[str, Any] = {"of": "example"}
    if setting.norm == "batch":
        question = {"of": "microbatch", "microbatch_size": min(size, len(pictures.public))}
    if setting.parts == "groups":
        return ByNorm(public, groups=GROUPS, among=setting.layers, **question)
    if setting.parts in ("enhanced", "zhang"):
        return Adaptive(public, kind=setting.parts, groups=setting.layers, **question)
    kind = "paper" if setting.parts == "multipliers-paper" else "optimal"
    # With this scale max_norm has the same range of values as in the other rows.
    return Multipliers(public, kind=kind, groups=setting.layers, keep_length=True, **question)


def _local_update(rate: float) -> Callable[[nn.Module, Any], None]:
    """A few SGD steps with momentum, each on a share of a microbatch. `Batch` clips the total change."""

    def momentum_steps(model: nn.Module, microbatch: Any) -> None:
        x, y = microbatch
        optimizer = torch.optim.SGD(model.parameters(), rate, momentum=LOCAL_MOMENTUM)
        for rows in torch.arange(len(x), device=x.device).chunk(LOCAL_STEPS):
            optimizer.zero_grad()
            losses_of(model, x[rows], y[rows]).mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return momentum_steps
