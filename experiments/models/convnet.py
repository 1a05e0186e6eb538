"""Four convolutions and a linear layer: the light network of the batch-clipping paper."""

from __future__ import annotations

from torch import nn

from experiments.models.norms import norm_of

CHANNELS = (32, 64, 64, 128)


def convnet(classes: int = 10, *, norm: str = "batch", image_channels: int = 3) -> nn.Sequential:
    """The network of table 1 of Nguyen et al.: 132,042 parameters, 576 of them of norms.

    Each convolution of 3 x 3 keeps the size of its input and has a norm, ReLU and a mean pool behind it. The
    last pool is over all positions, so images may have any size from 8 x 8. The table has the activation in
    the convolution's row and does not say whether it comes before or after the norm: here it comes after.

    Args:
        classes: the number of outputs.
        norm: "batch" as in the table, "layer", "group" or "none".
        image_channels: 3 for colour, 1 for grey.
    """
    make_norm = norm_of(norm)
    layers: list[nn.Module] = []
    inputs = image_channels
    for outputs in CHANNELS:
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), make_norm(outputs), nn.ReLU(), nn.AvgPool2d(2)]
        inputs = outputs
    layers[-1] = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs, classes))
