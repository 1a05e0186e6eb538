"""What stands in for batch normalization, which mixes the examples of a batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Norm = Callable[[int], nn.Module]


class FrozenBatchNorm2d(nn.Module):
    """Batch normalization whose statistics and parameters are all constants, as in the paper."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name, value in (("mean", 0.0), ("variance", 1.0), ("scale", 1.0), ("shift", 0.0)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x: Tensor) -> Tensor:
        """Each channel by its own constants."""
        mean, variance, scale, shift = self.buffers()
        return F.batch_norm(x, mean, variance, scale, shift, training=False)


def group_norm(channels: int) -> nn.Module:
    """Group normalization with 32 groups, or a group a channel if there are fewer."""
    return nn.GroupNorm(min(32, channels), channels)
