"""A linear model of fixed features."""

from __future__ import annotations

from torch import Tensor, nn


class LinearOnFeatures(nn.Module):
    """A linear model of fixed features, which may be stored in a shorter type. It starts at 0."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, classes)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x_BF: Tensor) -> Tensor:
        """[B, features] to [B, classes]."""
        return self.linear(x_BF.to(self.linear.weight.dtype))  # type: ignore[no-any-return]
