"""Replace modules of a model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


def exchange_modules(model: nn.Module, others: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Replace every occurrence of the old modules, in place. Returns the model, or its replacement."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in others:
                parent._modules[name] = others[child]
    return others.get(model, model)
