"""The models for tables."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clipwise.validation.arguments import one_of

HIDDEN = 64
MODELS = ("linear", "mlp")


class WithinRange(nn.Module):
    """Turns one output per row, about -1 to 1, into a number of the target's range."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        self.middle, self.reach = (low + high) / 2, (high - low) / 2

    def forward(self, x_B1: Tensor) -> Tensor:
        """[B, 1] to [B]."""
        return self.middle + self.reach * x_B1.squeeze(1)


def table_model(name: str, inputs: int, outputs: int, bounds: tuple[float, float] | None) -> nn.Module:
    """A linear model or a network with one hidden layer. `bounds` is the range of a regression target."""
    one_of("model", name, MODELS)
    last = nn.Linear(inputs if name == "linear" else HIDDEN, outputs)
    with torch.no_grad():
        if name == "linear":  # convex: 0 is a good start, and no direction is preferred
            last.weight.zero_()
        last.bias.zero_()
    layers: list[nn.Module] = [last] if name == "linear" else [nn.Linear(inputs, HIDDEN), nn.Tanh(), last]
    return nn.Sequential(*layers, *([] if bounds is None else [WithinRange(*bounds)]))
