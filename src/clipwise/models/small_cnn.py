"""A convolutional network for small grey images."""

from __future__ import annotations

from torch import nn


def small_cnn(classes: int = 10, *, image_size: int = 8, width: int = 16) -> nn.Sequential:
    """Two convolutions with tanh and pooling, then a linear layer.

    tanh instead of ReLU: its outputs are bounded, so per-example gradients stay closer to one length and
    clipping distorts them less (Papernot et al. 2021). No batch normalization, which mixes examples.

    Args:
        classes: the number of outputs.
        image_size: height and width of the images, a multiple of 4.
        width: channels of the first convolution; the second has twice as many.
    """
    pooled = image_size // 4
    return nn.Sequential(
        nn.Conv2d(1, width, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * pooled * pooled, classes),
    )
