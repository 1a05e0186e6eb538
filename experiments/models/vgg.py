"""VGG-16, and the light VGG of table 1 of Davody et al., for images of 32 x 32."""

from __future__ import annotations

from torch import nn

from experiments.models.normalized import normalized

# Convolutions of each stage, and their channels in units of the first stage's; a pool ends a stage.
_VGG16 = ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8))
_LIGHT = ((2, 1), (2, 2), (4, 4))


def vgg16(
    classes: int = 10,
    *,
    norm: str = "batch",
    placement: str = "hidden",
    image_channels: int = 3,
    width: int = 64,
) -> nn.Sequential:
    """VGG-16 (Simonyan and Zisserman 2014): 13 convolutions of 3 x 3, then 512, 512 and the classes.

    The hidden linear layers have 512 units, as is usual for CIFAR, and not 4,096.

    Args:
        classes: the number of outputs.
        norm: "batch", "layer", "group" or "none".
        placement: behind which layers: "hidden" ones, "every" one, or "mod": the last of the hidden ones left out.
        image_channels: 3 for colour.
        width: channels of the first stage; the linear layers have eight times as many.
    """
    layers = [*_convolutions(_VGG16, image_channels, width), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    units = 8 * width
    layers += [nn.Linear(units, units), nn.ReLU(), nn.Linear(units, units), nn.ReLU()]
    return normalized([*layers, nn.Linear(units, classes)], norm, placement)


def light_vgg(
    classes: int = 10,
    *,
    norm: str = "batch",
    placement: str = "every",
    image_channels: int = 3,
    width: int = 64,
) -> nn.Sequential:
    """Two convolutions of 64, two of 128 and four of 256 channels with pools between, then 512 and the classes.

    This is the VGG of table 1 of Davody et al. Its details are in an appendix that was not at hand: kernels of 3 x 3,
    ReLU and maximum pools are those of VGG.

    Args:
        classes: the number of outputs.
        norm: "batch", "layer", "group" or "none".
        placement: behind which layers: "every" one, "hidden" ones, or "mod": one fewer.
        image_channels: 3 for colour.
        width: channels of the first stage.
    """
    layers = [*_convolutions(_LIGHT, image_channels, width), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    layers += [nn.Linear(4 * width, 8 * width), nn.ReLU(), nn.Linear(8 * width, classes)]
    return normalized(layers, norm, placement)


def _convolutions(stages: tuple[tuple[int, int], ...], inputs: int, width: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for count, times in stages:
        for _ in range(count):
            layers += [nn.Conv2d(inputs, times * width, 3, padding=1), nn.ReLU()]
            inputs = times * width
        layers.append(nn.MaxPool2d(2))
    return layers
