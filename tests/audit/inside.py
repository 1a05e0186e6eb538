"""Runs of strategies that bound gradients inside the network, and a record that reaches their bounds."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise import Backprop, Lipschitz, Private, layers
from clipwise.audit.trial import run_of
from tests.audit.bug import Subject, losses, network, rows

# Everyone takes part in one step.
FULL: dict[str, Any] = {"sampling": "full", "sample_rate": None, "steps": 1}


def weighted(model: nn.Module, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Each record brings along how much its loss counts."""
    return w * losses(model, x, y)


def quiet() -> tuple[Tensor, Tensor, Tensor]:
    """Records that say little, so that a loud one is heard."""
    x, y = rows()
    return x, y, torch.full((len(x),), 1e-3)


def loud(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A record whose gradient is cut to the bound wherever something is clipped."""
    return x, torch.tensor(1), torch.tensor(1e4)


def isometric() -> nn.Sequential:
    """Layers that make no vector longer, and those of one half-space no shorter."""
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
    # The bound of the first layer is small, so that what comes back from the second is longer.
    model = layers.clip_inputs(network(), input_norm=0.5, grad_norm={"0": 0.1, "2": 1.0})
    return run_of(model, weighted, quiet(), Backprop(), **options)


# The subjects, and the input of a record that is the worst for each. For the first: all ReLUs let it pass.
INSIDE = {
    "Lipschitz": (lipschitz, isometric()[1].weight.detach().T @ torch.ones(5)),
    "Backprop": (backprop, torch.full((5,), 50.0)),
}
