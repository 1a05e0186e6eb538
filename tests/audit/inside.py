"""Runs of strategies that bound gradients inside the network, and a record that reaches their bounds."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise import Backprop, Lipschitz, Private, layers
from clipwise.audit.trial import run_of
from tests.audit.bug import Subject, losses, network, rows

# Every record takes part in one step.
FULL: dict[str, Any] = {"sampling": "full", "sample_rate": None, "steps": 1}


def weighted(model: nn.Module, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Each record carries the weight of its loss."""
    return w * losses(model, x, y)


def quiet() -> tuple[Tensor, Tensor, Tensor]:
    """Records with small gradients, so that a large one stands out."""
    x, y = rows()
    return x, y, torch.full((len(x),), 1e-3)


def loud(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A record with a gradient that is clipped to the bound in every layer."""
    return x, torch.tensor(1), torch.tensor(1e4)


def isometric() -> nn.Sequential:
    """Layers that increase no norm, and preserve the norms of one half-space."""
    torch.manual_seed(0)
    model = nn.Sequential(layers.ClipInput(1.0), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
    for layer in (model[1], model[3]):
        nn.init.orthogonal_(layer.weight)
        nn.init.zeros_(layer.bias)
    return model


def _step(private: Private, model: nn.Module, x: Tensor, y: Tensor, w: Tensor) -> bool:
    outputs = model(x)
    return private.step(w * F.cross_entropy(outputs, y, reduction="none"), outputs=outputs)


def lipschitz(**options: Any) -> Subject:
    clipping = Lipschitz(max_weight_norm=1.0, input_norm=1.0)
    return run_of(isometric(), weighted, quiet(), clipping, step=_step, **options)


def backprop(**options: Any) -> Subject:
    # The bound of the first layer is small, so that the gradient from the second layer exceeds it.
    model = layers.clip_inputs(network(), input_norm=0.5, grad_norm={"0": 0.1, "2": 1.0})
    return run_of(model, weighted, quiet(), Backprop(), **options)


# The subjects, and the input of a worst-case record for each. For the first, all ReLUs are active.
INSIDE = {
    "Lipschitz": (lipschitz, isometric()[1].weight.detach().T @ torch.ones(5)),
    "Backprop": (backprop, torch.full((5,), 50.0)),
}
