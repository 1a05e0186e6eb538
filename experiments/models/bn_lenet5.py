"""LeNet-5 with a norm behind each convolution."""

from __future__ import annotations

from torch import nn

from experiments.models.norms import norm_of


def bn_lenet5(classes: int = 10, *, norm: str = "batch", image_channels: int = 1) -> nn.Sequential:
    """The network of table 2 of Nguyen et al., for images of 32 x 32: 61,990 parameters in 8 layers.

    Without norms it is LeNet-5 in its plain form, with 61,706 parameters. The last convolution leaves one
    position. The activation comes behind the norm; the table does not say.

    Args:
        classes: the number of outputs.
        norm: "batch" as in the table, "layer", "group" or "none".
        image_channels: 1 for grey, 3 for colour.
    """
    make_norm = norm_of(norm)
    return nn.Sequential(
        nn.Conv2d(image_channels, 6, 5),
        make_norm(6),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5),
        make_norm(16),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(16, 120, 5),
        make_norm(120),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(120, 84),
        nn.Tanh(),
        nn.Linear(84, classes),
    )
