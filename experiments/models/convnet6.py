"""Four convolutions and two linear layers, for grey images of 28 x 28."""

from __future__ import annotations

from torch import nn

from experiments.models.lipschitz_blocks import first_clip, pooled_convolutions

CHANNELS = (16, 32, 64, 128)
HIDDEN = 256


def convnet6(
    classes: int = 10,
    *,
    norm: str = "none",
    image_channels: int = 1,
    input_norm: float | None = None,
    groups: int = 8,
    alpha: float = 0.5,
) -> nn.Sequential:
    """The ConvNet for Fashion-MNIST of Barczewski and Ramon (2024): six layers, 132,746 parameters.

    They print the number of layers and of parameters, and no list of layers. This list is ours and has these numbers:
    convolutions of 3 x 3 with 16, 32, 64 and 128 filters, each with a mean pool of 2 x 2 behind it, which leave one
    position; then 256 units and the classes.

    Args:
        classes: the number of outputs.
        norm: behind each convolution: "none", "group" or "bounded".
        image_channels: 1 for grey.
        input_norm: begin with a clip of the inputs to this norm.
        groups: of the norms.
        alpha: the floor under the deviation, for "bounded".
    """
    return nn.Sequential(
        *first_clip(input_norm),
        *pooled_convolutions(image_channels, CHANNELS, norm, groups, alpha),
        nn.Flatten(),
        nn.Linear(CHANNELS[-1], HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, classes),
    )
