"""The form (layout and SGD) in which plain training is fastest. All columns of a row are measured in that form."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from benchmarks.methods import REFERENCE, steps_by, synchronize
from benchmarks.networks import build
from benchmarks.shapes import shape_of
from benchmarks.timing import Effort, interleave, settled
from benchmarks.workload import Setting, make_workload

_CHOSEN = ("sgd-foreach", "sgd-fused")
_CLEARLY = 0.99  # another form must be faster than the usual one by this factor
_EFFORT = Effort(rounds=9, least_rounds=3, enough_seconds=1.0, cell_seconds=8.0)


def fastest_form(setting: Setting, device: torch.device, seed: int) -> Setting:
    """The setting with the layout, and then the SGD, that make a plain step fastest; as given if they are chosen."""
    if setting.optimizer in _CHOSEN:
        return setting
    usual = replace(setting, optimizer="sgd-foreach", channels_last=False)
    layouts = [usual, replace(usual, channels_last=True)] if _has_convolutions(setting) else [usual]
    best = _fastest(layouts, device, seed)
    return _fastest([best, replace(best, optimizer="sgd-fused")], device, seed)


def _fastest(settings: list[Setting], device: torch.device, seed: int) -> Setting:
    if len(settings) == 1:
        return settings[0]
    wait = partial(synchronize, device)
    with ExitStack() as stack:
        contenders = {}
        for number, setting in enumerate(settings):
            step = stack.enter_context(steps_by(REFERENCE, make_workload(setting, device, seed)))
            contenders[str(number)] = settled(step, 3, _EFFORT.cell_seconds / 2, wait)
        rounds = interleave(contenders, _EFFORT, wait)
    ratios = [rounds.ratio(name, "0") for name in contenders]
    best = min(range(len(settings)), key=ratios.__getitem__)
    return settings[best] if ratios[best] < _CLEARLY else settings[0]


def _has_convolutions(setting: Setting) -> bool:
    with torch.device("meta"):
        model = build(setting.model, shape_of(setting.data))
    return any(isinstance(module, nn.Conv2d) for module in model.modules())
