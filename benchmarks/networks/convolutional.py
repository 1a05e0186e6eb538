"""ResNet and VGG, with a normalization that does not mix examples, unlike batch norm."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.shapes import Images

Norm = Callable[[int], nn.Module]
# Blocks in each of the four stages, and whether a block is a bottleneck of three convolutions.
RESNETS = {18: ((2, 2, 2, 2), False), 34: ((3, 4, 6, 3), False), 50: ((3, 4, 6, 3), True), 101: ((3, 4, 23, 3), True)}
# Output channels of the convolutions between two pools.
VGGS = {
    11: ((64,), (128,), (256, 256), (512, 512), (512, 512)),
    16: ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512)),
}
# Untrained and without batch statistics, a sum of many full-size branches grows out of range. A branch of
# this weight adds 4% of variance.
_BRANCH = 0.2


class FrozenBatchNorm2d(nn.Module):
    """Batch normalization with constant statistics and parameters, as in the paper."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name, value in (("mean", 0.0), ("variance", 1.0), ("scale", 1.0), ("shift", 0.0)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x: Tensor) -> Tensor:
        """Scale and shift each channel by its constants."""
        mean, variance, scale, shift = self.buffers()
        return F.batch_norm(x, mean, variance, scale, shift, training=False)


def group_norm(channels: int) -> nn.Module:
    """Group normalization with 32 groups, or one group per channel if there are fewer channels."""
    return nn.GroupNorm(min(32, channels), channels)


class Residual(nn.Module):
    """A branch of convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool, norm: Norm) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        if bottleneck:
            plan = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        else:
            plan = [(inputs, width, 3, stride), (width, width, 3, 1)]
        layers: list[nn.Module] = []
        for i, o, kernel, step in plan:
            layers += [_convolution(i, o, kernel, step), norm(o), nn.ReLU()]
        self.branch = nn.Sequential(*layers[:-1])
        changes = stride != 1 or inputs != outputs
        self.shortcut: nn.Module = nn.Identity()
        if changes:
            self.shortcut = nn.Sequential(_convolution(inputs, outputs, 1, stride), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both, rectified."""
        return (self.shortcut(x) + _BRANCH * self.branch(x)).relu()  # type: ignore[no-any-return]


def resnet(images: Images, layers: int, norm: Norm, *, small_images: bool = False) -> nn.Module:
    """ResNet-18, 34, 50 or 101: a 7 x 7 stem, four stages, the mean over positions, a linear layer.

    For small images the stem is 3 x 3, and keeps their size.
    """
    blocks, bottleneck = RESNETS[layers]
    stages: list[nn.Module] = []
    channels = 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for number in range(count):
            stride = 2 if stage > 0 and number == 0 else 1
            stages.append(Residual(channels, width, stride, bottleneck, norm))
            channels = 4 * width if bottleneck else width
    if small_images:
        stem = [_convolution(images.channels, 64, 3, 1), norm(64), nn.ReLU()]
    else:
        stem = [_convolution(images.channels, 64, 7, 2), norm(64), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, images.classes)]
    return nn.Sequential(*stem, *stages, *head)


def vgg(images: Images, layers: int, norm: Norm, *, small_images: bool = False) -> nn.Module:
    """VGG-11 or 16 with a norm behind each convolution. No dropout: it costs every method the same.

    For images of 32 x 32 the pools leave one position, and the head is a single layer.
    """
    features: list[nn.Module] = []
    channels = images.channels
    for widths in VGGS[layers]:
        for width in widths:
            features += [_convolution(channels, width, 3, 1), norm(width), nn.ReLU()]
            channels = width
        features.append(nn.MaxPool2d(2))
    if small_images:
        return nn.Sequential(*features, nn.Flatten(), nn.Linear(channels, images.classes))
    return nn.Sequential(
        *features,
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        nn.Linear(channels * 49, 4096),
        nn.ReLU(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, images.classes),
    )


def _convolution(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Conv2d:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_in", nonlinearity="relu")
    return layer
