"""Four convolutions and a linear layer, for colour images of 32 x 32."""

from __future__ import annotations

from torch import nn

from experiments.models.convnet import CHANNELS
from experiments.models.lipschitz_blocks import first_clip, pooled_convolutions

LAST_SIDE = 4  # of the image before the last pool


def shallow_vgg(
    classes: int = 10,
    *,
    norm: str = "none",
    image_channels: int = 3,
    input_norm: float | None = None,
    groups: int = 8,
    alpha: float = 0.5,
) -> nn.Sequential:
    """The ShallowVGG for CIFAR-10 of Barczewski and Ramon (2024): 131,466 parameters.

    They print the numbers of layers (6) and of parameters, and no list of layers. The number of parameters is that of
    the light network that `convnet` is without its norms: 32, 64, 64 and 128 filters of 3 x 3, mean pools, and a linear
    layer. It has five layers with weights; which sixth they count we do not know.

    Args:
        classes: the number of outputs.
        norm: behind each convolution: "none", "group" or "bounded".
        image_channels: 3 for colour.
        input_norm: begin with a clip of the inputs to this norm.
        groups: of the norms.
        alpha: the floor under the deviation, for "bounded".
    """
    return nn.Sequential(
        *first_clip(input_norm),
        *pooled_convolutions(image_channels, CHANNELS, norm, groups, alpha, last_pool=LAST_SIDE),
        nn.Flatten(),
        nn.Linear(CHANNELS[-1], classes),
    )
