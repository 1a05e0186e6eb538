"""One convolution and two linear layers, for grey images of 28 x 28."""

from __future__ import annotations

from torch import nn

from experiments.models.lipschitz_blocks import first_clip, norm_behind


def convnet3(
    classes: int = 10,
    *,
    norm: str = "none",
    image_channels: int = 1,
    input_norm: float | None = None,
    groups: int = 8,
    alpha: float = 0.5,
) -> nn.Sequential:
    """The ConvNet for MNIST of Barczewski and Ramon (2024): three layers, 83,154 parameters.

    They print the number of layers and of parameters, and no list of layers. This list is ours and has these numbers:
    20 filters of 5 x 5, a mean pool of 3 x 3 that leaves 8 x 8 positions, 64 units, and the classes. Pools take means
    since their slope is 1/3 here, where that of a largest value is 1: the bounds are tighter.

    Args:
        classes: the number of outputs.
        norm: behind the convolution: "none", "group" or "bounded".
        image_channels: 1 for grey.
        input_norm: begin with a clip of the inputs to this norm.
        groups: of the norm.
        alpha: the floor under the deviation, for "bounded".
    """
    return nn.Sequential(
        *first_clip(input_norm),
        nn.Conv2d(image_channels, 20, 5),
        norm_behind(norm, 20, groups, alpha),
        nn.ReLU(),
        nn.AvgPool2d(3),
        nn.Flatten(),
        nn.Linear(20 * 8 * 8, 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    )
