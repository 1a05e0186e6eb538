"""The convolutional network of an old TensorFlow tutorial, which early private training was shown on."""

from __future__ import annotations

from torch import nn

from experiments.models.normalized import normalized

SIDE = 24  # images are cut to their middle


def tutorial_cnn(
    classes: int = 10, *, norm: str = "none", placement: str = "every", image_channels: int = 3
) -> nn.Sequential:
    """Two convolutions of 5 x 5 with 64 channels and maximum pools, then 384, 384 and the classes.

    In the form of Abadi et al. (2016), for images of 24 x 24: 1,144,138 parameters without norms.

    Args:
        classes: the number of outputs.
        norm: "none", "layer", "group" or "batch".
        placement: behind which layers: "every" one, "hidden" ones, or "mod": one fewer.
        image_channels: 3 for colour.
    """
    positions = (SIDE // 4) ** 2
    return normalized(
        [
            nn.Conv2d(image_channels, 64, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * positions, 384),
            nn.ReLU(),
            nn.Linear(384, 384),
            nn.ReLU(),
            nn.Linear(384, classes),
        ],
        norm,
        placement,
    )
