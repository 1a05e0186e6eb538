"""A convolutional network for small grey images."""

from __future__ import annotations

from torch import nn


def small_cnn(classes: int = 10, *, image_size: int = 8, width: int = 16) -> nn.Sequential:
    """Two convolutions with tanh, then a linear layer.

    It suits private training for three reasons. The outputs of tanh are bounded, so gradients of different examples
    have similar norms and clipping distorts them less (Papernot et al. 2021). There are few parameters, each of which
    gets noise. There is no batch normalization, which mixes examples: each image is normalized to mean 0 and variance 1
    by its own pixels.

    Args:
        classes: the number of outputs.
        image_size: height and width of the images, an even number.
        width: channels of each convolution.
    """
    convolutions = (nn.Conv2d(1, width, kernel_size=3, padding=1), nn.Conv2d(width, width, kernel_size=3, padding=1))
    for convolution in convolutions:
        # torch's default initialization suits other activations: with it this network starts nearly linear.
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
