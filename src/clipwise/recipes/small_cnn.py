"""A convolutional network for small grey images."""

from __future__ import annotations

from torch import nn


def small_cnn(classes: int = 10, *, image_size: int = 8, width: int = 16) -> nn.Sequential:
    """Two convolutions with tanh, then a linear layer.

    What suits private training: tanh, whose bounded outputs keep the gradients of different examples at similar
    lengths, so that clipping distorts them less (Papernot et al. 2021); few parameters, as each gets its
    share of noise; and no batch normalization, which mixes examples. Instead, each image is brought to mean
    0 and variance 1 by its own pixels alone.

    Args:
        classes: the number of outputs.
        image_size: height and width of the images, an even number.
        width: channels of each convolution.
    """
    convolutions = (
        nn.Conv2d(1, width, kernel_size=3, padding=1),
        nn.Conv2d(width, width, kernel_size=3, padding=1),
    )
    for convolution in convolutions:
        # torch's default suits other activations: under it this network begins nearly linear.
        nn.init.xavier_uniform_(convolution.weight, gain=nn.init.calculate_gain("tanh"))
    return nn.Sequential(
        nn.GroupNorm(1, 1, affine=False),
        convolutions[0],
        nn.Tanh(),
        nn.MaxPool2d(2),
        convolutions[1],
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(width * (image_size // 2) ** 2, classes),
    )
