"""Networks for images that train well under noise: none mixes examples, and most have bounded or normalized outputs."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipwise.layers.standardized_weights import standardize_weights
from clipwise.recipes.small_cnn import small_cnn


def tanh_cnn(channels: int, image_size: int, classes: int) -> nn.Module:
    """The network of Papernot et al. (2021), with group normalization of each image; a smaller one for tiny images."""
    if image_size < 20:
        return nn.Sequential(Grey(channels), small_cnn(classes, image_size=image_size))
    features = nn.Sequential(
        nn.GroupNorm(1, channels, affine=False),
        nn.Conv2d(channels, 16, 8, stride=2, padding=3),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
    )
    with torch.no_grad():
        size = features(torch.zeros(1, channels, image_size, image_size)).shape[1]
    return nn.Sequential(*features, nn.Linear(size, 32), nn.Tanh(), nn.Linear(32, classes))


class Grey(nn.Module):
    """The mean over channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """[B, C, H, W] to [B, 1, H, W]."""
        return x_BCHW.mean(1, keepdim=True)


class WideResNet(nn.Module):
    """A wide residual network with 16 layers of width 4 and group normalization, as De et al. (2022) train privately.

    Each normalization follows its activation, and the weights of convolutions are standardized.
    """

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        sizes = (16, 64, 128, 256)
        self.first = nn.Conv2d(channels, sizes[0], 3, padding=1)
        stages = []
        for stage, (before, after) in enumerate(pairwise(sizes)):
            stages += [_Block(before, after, stride=1 if stage == 0 else 2), _Block(after, after, stride=1)]
        self.stages = nn.Sequential(*stages)
        self.last = nn.GroupNorm(16, sizes[-1])
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """[B, C, H, W] to [B, classes]."""
        x_BCHW = self.last(F.relu(self.stages(self.first(x_BCHW))))
        return self.head(x_BCHW.mean((2, 3)))  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(16, before), nn.GroupNorm(16, after)
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.shortcut = nn.Conv2d(before, after, 1, stride=stride) if before != after or stride > 1 else None

    def forward(self, x_BCHW: Tensor) -> Tensor:
        normal = self.norm1(F.relu(x_BCHW))
        kept = x_BCHW if self.shortcut is None else self.shortcut(normal)
        return kept + self.conv2(self.norm2(F.relu(self.conv1(normal))))  # type: ignore[no-any-return]


def wide_resnet(channels: int, classes: int) -> nn.Module:
    """WRN-16-4 with standardized weights."""
    return standardize_weights(WideResNet(channels, classes))
