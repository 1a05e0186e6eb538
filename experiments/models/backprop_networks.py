"""The two networks of the paper on backpropagation clipping (Stevens et al. 2022), with options.

The paper has no padding and no bias, because it has no bound for them. clipwise has, so both are options.
"""

from __future__ import annotations

from torch import nn

from clipwise.errors import ConfigurationError
from clipwise.validation.arguments import one_of
from experiments.models.norms import norm_of

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


def backprop_mnist(
    classes: int = 10, *, padding: bool = False, bias: bool = False, activation: str = "relu", norm: str = "none"
) -> nn.Sequential:
    """For grey images of 28 x 28: 18,752 weights as printed; 26,010 parameters with padding and bias.

    Args:
        classes: the number of outputs.
        padding: two zeros around the image, as in the network that the paper started from.
        bias: in every layer.
        activation: "relu", or "tanh", which is better for per-example clipping.
        norm: behind each convolution: "none" as printed, "group", "layer" or "batch".
    """
    act = _activation(activation)
    side = 4 if padding else 3
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=2 if padding else 0, bias=bias),
        *_norm(norm, 16),
        act(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2, bias=bias),
        *_norm(norm, 32),
        act(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(32 * side * side, 32, bias=bias),
        act(),
        nn.Linear(32, classes, bias=bias),
    )


def backprop_cifar10(
    classes: int = 10,
    *,
    pool_stride: int = 1,
    padding: bool = False,
    bias: bool = False,
    activation: str = "relu",
    norm: str = "none",
) -> nn.Sequential:
    """For colour images of 32 x 32. As printed its pools have stride 1, and its first linear layer 28.9 M weights.

    Args:
        classes: the number of outputs.
        pool_stride: 1, or 2, which leaves 4 x 4 pixels to the linear layer and needs padding.
        padding: convolutions keep the size of an image.
        bias: in every layer.
        activation: "relu" or "tanh".
        norm: as in `backprop_mnist`.
    """
    if pool_stride not in (1, 2):
        raise ConfigurationError(f"pool_stride={pool_stride!r} is not possible: use 1 or 2.")
    if pool_stride == 2 and not padding:
        raise ConfigurationError("pool_stride=2 leaves no pixel to the last convolution: give padding=True too.")
    act = _activation(activation)
    layers: list[nn.Module] = []
    channels, side = 3, 32
    for block, width in enumerate((32, 64, 128, 256)):
        if block:
            layers.append(nn.AvgPool2d(2, stride=pool_stride))
            side = (side - 2) // pool_stride + 1
        for _ in range(2):
            layers += [
                nn.Conv2d(channels, width, 2, padding="same" if padding else "valid", bias=bias),
                *_norm(norm, width),
                act(),
            ]
            channels, side = width, side if padding else side - 1
    return nn.Sequential(
        *layers,
        nn.Flatten(),
        nn.Linear(channels * side * side, 256, bias=bias),
        act(),
        nn.Linear(256, classes, bias=bias),
    )


def _norm(name: str, channels: int) -> list[nn.Module]:
    """The norm as a list of modules, empty for "none"."""
    made = norm_of(name)(channels)
    return [] if name == "none" else [made]


def _activation(name: str) -> type[nn.Module]:
    one_of("activation", name, _ACTIVATIONS)
    return _ACTIVATIONS[name]
