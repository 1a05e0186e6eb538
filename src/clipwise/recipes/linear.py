"""Linear models of fixed features."""

from __future__ import annotations

import torch
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


class LinearOnHashedWords(nn.Module):
    """A linear model of a sparse vector, given by the places of its entries and their weights. It starts at 0."""

    def __init__(self, places: int, classes: int) -> None:
        super().__init__()
        self.table = nn.Embedding(places, classes)
        self.bias = nn.Parameter(torch.zeros(classes))
        nn.init.zeros_(self.table.weight)

    def forward(self, ids_BT: Tensor, weights_BT: Tensor) -> Tensor:
        """The sum of the weighted rows of each text, [B, classes]."""
        return (self.table(ids_BT) * weights_BT.unsqueeze(-1)).sum(1) + self.bias  # type: ignore[no-any-return]
