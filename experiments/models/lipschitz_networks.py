"""Networks with gradients that are bounded by the norms of their weights, after Barczewski and Ramon (2024).

The paper gives the numbers of layers and of parameters but no list of layers. The lists are ours, with these numbers.
Pools are mean pools: their slope is smaller than that of max pools, so the bounds are tighter.

Common arguments: the number of `classes`; `norm` behind each layer except the last linear ones ("none", "group" or
"bounded"); `input_norm`, to which inputs are clipped if it is given; the `groups` of norms; and `alpha`, the least
deviation for "bounded".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from clipwise.layers.bounded import BoundedGroupNorm, ClipInput
from clipwise.validation.arguments import one_of
from experiments.models.normalized_networks import CONVNET_CHANNELS
from experiments.models.norms import MOST_GROUPS, Norm, group_norm, no_norm

KINDS = ("none", "group", "bounded")


def mlp2(
    classes: int = 2,
    *,
    features: int,
    hidden: int = 16,
    norm: str = "none",
    input_norm: float | None = None,
    groups: int = 8,
    alpha: float = 0.5,
) -> nn.Sequential:
    """The network for tables: two layers, and 140 to 2,120 parameters.

    The width `hidden` is ours: hidden (features + 1) + classes (hidden + 1) parameters.
    """
    make_norm = _norm(norm, groups, alpha)
    layers = [nn.Linear(features, hidden), make_norm(hidden), nn.ReLU(), nn.Linear(hidden, classes)]
    return nn.Sequential(*_clip(input_norm), *layers)


def convnet3(
    classes: int = 10,
    *,
    norm: str = "none",
    image_channels: int = 1,
    input_norm: float | None = None,
    groups: int = 8,
    alpha: float = 0.5,
) -> nn.Sequential:
    """The ConvNet for MNIST, images of 28 x 28: three layers, 83,154 parameters.

    20 filters of 5 x 5, a mean pool of 3 x 3 that leaves 8 x 8 positions, 64 units, and the classes.
    """
    layers = [nn.Conv2d(image_channels, 20, 5), _norm(norm, groups, alpha)(20), nn.ReLU(), nn.AvgPool2d(3)]
    head = [nn.Flatten(), nn.Linear(20 * 8 * 8, 64), nn.ReLU(), nn.Linear(64, classes)]
    return nn.Sequential(*_clip(input_norm), *layers, *head)


def convnet6(
    classes: int = 10,
    *,
    norm: str = "none",
    image_channels: int = 1,
    input_norm: float | None = None,
    groups: int = 8,
    alpha: float = 0.5,
) -> nn.Sequential:
    """The ConvNet for Fashion-MNIST, images of 28 x 28: six layers, 132,746 parameters.

    Convolutions of 3 x 3 with 16, 32, 64 and 128 filters, each with a mean pool of 2 x 2 behind it, which leave one
    position; then 256 units and the classes.
    """
    layers = _pooled(image_channels, (16, 32, 64, 128), _norm(norm, groups, alpha))
    head = [nn.Flatten(), nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, classes)]
    return nn.Sequential(*_clip(input_norm), *layers, *head)


def shallow_vgg(
    classes: int = 10,
    *,
    norm: str = "none",
    image_channels: int = 3,
    input_norm: float | None = None,
    groups: int = 8,
    alpha: float = 0.5,
) -> nn.Sequential:
    """The ShallowVGG for CIFAR-10, images of 32 x 32: 131,466 parameters.

    The paper prints 6 layers. The number of parameters is that of the light network that `convnet` is without its
    norms: 32, 64, 64 and 128 filters of 3 x 3, mean pools, and a linear layer. It has five layers with weights; the
    paper does not name the sixth.
    """
    layers = _pooled(image_channels, CONVNET_CHANNELS, _norm(norm, groups, alpha), last_pool=4)
    return nn.Sequential(*_clip(input_norm), *layers, nn.Flatten(), nn.Linear(128, classes))


def patch_convnet6(
    classes: int = 10,
    *,
    norm: str = "none",
    image_channels: int = 1,
    input_norm: float | None = None,
    groups: int = 8,
    alpha: float = 0.5,
) -> nn.Sequential:
    """Six layers and 132,746 parameters, as `convnet6`, for images of 28 x 28, with windows that do not overlap.

    A convolution with overlapping windows has the bound sqrt(cover) times the norm of its filters, which is far above
    its gain on random images: over four layers the bounds grow by hundreds. Here each window is as large as its stride:
    2 x 2, 2 x 2, 1 x 1 and 7 x 7 with 8, 24, 40 and 64 filters, which leave one position; then 72 units and the
    classes.
    """
    layers = _patches(image_channels, (8, 24, 40, 64), (2, 2, 1, 7), _norm(norm, groups, alpha))
    head = [nn.Flatten(), nn.Linear(64, 72), nn.ReLU(), nn.Linear(72, classes)]
    return nn.Sequential(*_clip(input_norm), *layers, *head)


def patch_vgg(
    classes: int = 10,
    *,
    norm: str = "none",
    image_channels: int = 3,
    input_norm: float | None = None,
    groups: int = 8,
    alpha: float = 0.5,
) -> nn.Sequential:
    """Five layers and 131,466 parameters, as `shallow_vgg`, for images of 32 x 32; see `patch_convnet6`.

    Windows of 2 x 2, 2 x 2, 1 x 1 and 8 x 8 with 40, 32, 80 and 24 filters, and the classes.
    """
    layers = _patches(image_channels, (40, 32, 80, 24), (2, 2, 1, 8), _norm(norm, groups, alpha))
    return nn.Sequential(*_clip(input_norm), *layers, nn.Flatten(), nn.Linear(24, classes))


@torch.no_grad()
def make_orthogonal_(model: nn.Module) -> None:
    """Set each weight, as outputs x inputs, to orthonormal rows or columns (whichever are fewer), and biases to 0.

    All singular values are 1, so activations and gradients are close to their bounds.
    """
    for layer in model.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            nn.init.orthogonal_(layer.weight)
            if layer.bias is not None:
                layer.bias.zero_()


def _clip(input_norm: float | None) -> list[nn.Module]:
    """A module that clips inputs, if a norm is given."""
    return [] if input_norm is None else [ClipInput(input_norm)]


def _norm(kind: str, groups: int, alpha: float) -> Norm:
    """From channels to the norm behind a layer.

    Args:
        kind: "none"; "group", with a scale and a shift to train; or "bounded": (x - mu) / max(alpha, sigma), without
            parameters, with a slope of at most 1 / alpha.
        groups: the maximum number of groups, which are equal and have at least two channels.
    """
    one_of("norm", kind, KINDS)
    if kind == "bounded":
        return lambda channels: BoundedGroupNorm(
            math.gcd(min(groups, MOST_GROUPS), channels // 2 or 1), channels, alpha
        )
    return group_norm if kind == "group" else no_norm


def _pooled(inputs: int, channels: Sequence[int], norm: Norm, last_pool: int = 2) -> list[nn.Module]:
    """Convolutions of 3 x 3 that keep the size, each with its norm, ReLU and a mean pool of 2 x 2 behind it."""
    layers: list[nn.Module] = []
    for outputs in channels:
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), norm(outputs), nn.ReLU(), nn.AvgPool2d(2)]
        inputs = outputs
    layers[-1] = nn.AvgPool2d(last_pool)
    return layers


def _patches(inputs: int, channels: Sequence[int], windows: Sequence[int], norm: Norm) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for outputs, window in zip(channels, windows, strict=True):
        layers += [nn.Conv2d(inputs, outputs, window, window), norm(outputs), nn.ReLU()]
        inputs = outputs
    return layers
