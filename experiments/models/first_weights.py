"""First weights of networks whose bounds follow from the norms of their weights."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def make_orthogonal_(model: nn.Module) -> None:
    """Each layer as outputs x inputs: orthonormal rows or columns, whichever are fewer; no biases.

    All singular values are 1, so a network passes on nearly as much as its bounds allow.
    """
    for layer in model.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            nn.init.orthogonal_(layer.weight)
            if layer.bias is not None:
                layer.bias.zero_()
