"""The network of a setting, with public statistics or noisy weights if the setting has them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise import layers
from experiments import models
from experiments.harness.training import losses_of
from experiments.normalization.noisy_weights import with_noisy_weights
from experiments.normalization.setting import TEXT_MODELS, Setting

PRETRAINING_EPOCHS, PRETRAINING_BATCH, PRETRAINING_RATE = 20, 128, 1e-3


def network(
    setting: Setting, seed: int, channels: int, classes: int, public: TensorDataset, rows: Tensor | None
) -> nn.Module:
    """The network of a run with initial weights from the seed, on the device of the public part."""
    device = public.tensors[0].device
    model = _plain(setting, seed, channels, classes).to(device)
    if setting.pretrained:
        model.load_state_dict(_pretrained(setting, seed, channels, classes, public))
        _only_linear(model)
    if setting.has_public_norm:
        model, _ = layers.replace_batchnorm(model, rows, kind=setting.norm)
    elif setting.norm == "released":
        layers.with_released_statistics(model)
    elif setting.norm == "batch":
        # Each pass uses the statistics of its own rows: running statistics do not fit weights with fresh noise, and
        # those of private rows would be a release.
        layers.without_running_statistics(model)
    return with_noisy_weights(model, setting.noise) if setting.noise else model


def _plain(setting: Setting, seed: int, channels: int, classes: int) -> nn.Module:
    torch.manual_seed(seed)
    options: dict[str, Any] = {"norm": setting.built_norm, "placement": setting.placement, "classes": classes}
    if setting.model in TEXT_MODELS:
        options["trains_words"] = setting.trains_words
    else:
        options["image_channels"] = channels
    if setting.width is not None:
        options["width"] = setting.width
    return models.build(setting.model, **options)


def _pretrained(setting: Setting, seed: int, channels: int, classes: int, public: TensorDataset) -> dict[str, Tensor]:
    """Weights trained on public labelled images, and untrained linear layers."""
    plain = Setting(model=setting.model, norm=setting.built_norm, placement=setting.placement, width=setting.width)
    return _trained_openly(plain, seed, channels, classes, public)


@lru_cache(maxsize=16)
def _trained_openly(
    setting: Setting, seed: int, channels: int, classes: int, public: TensorDataset
) -> dict[str, Tensor]:
    x, y = public.tensors
    model = _plain(setting, seed, channels, classes).to(x.device)
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.Adam(model.parameters(), PRETRAINING_RATE)
    for _ in range(PRETRAINING_EPOCHS):
        for chosen in torch.randperm(len(x)).to(x.device).split(PRETRAINING_BATCH):  # type: ignore[no-untyped-call]
            if len(chosen) > 1:
                optimizer.zero_grad()
                losses_of(model, x[chosen], y[chosen]).mean().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    kept = model.state_dict()
    fresh = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return {name: first[name] if name.rpartition(".")[0] in fresh else tensor for name, tensor in kept.items()}


def _only_linear(model: nn.Module) -> None:
    """Freeze convolutions. Norms are trained, because exact public statistics need their gradients."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.requires_grad_(False)
