"""Tempered sigmoids: bounded activations that keep gradients of private training small."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from clipwise.errors import ConfigurationError
from clipwise.validation.arguments import plain


class TemperedSigmoid(nn.Module):
    """scale / (1 + exp(-temperature x)) - offset, for each value by itself. The defaults make it tanh.

    Args:
        scale: the distance between the two values that it tends to.
        temperature: the inverse temperature: the larger, the closer to a step.
        offset: what is taken off; scale / 2 makes it odd.

    Guarantee:
        Examples stay apart. Outputs lie in [-offset, scale - offset].
    """

    def __init__(self, scale: float = 2.0, temperature: float = 2.0, offset: float = 1.0) -> None:
        super().__init__()
        scale, temperature, offset = plain((scale, temperature, offset))
        for name, value in (("scale", scale), ("temperature", temperature), ("offset", offset)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ConfigurationError(f"TemperedSigmoid: {name} must be a finite number, not {value!r}.")
        self.scale, self.temperature, self.offset = scale, temperature, offset

    def forward(self, x: Tensor) -> Tensor:
        """Value by value."""
        return self.scale * torch.sigmoid(self.temperature * x) - self.offset

    def extra_repr(self) -> str:
        """For printing."""
        return f"scale={self.scale}, temperature={self.temperature}, offset={self.offset}"
