"""LeNet-300-100 and LeNet-5, for grey images of 28 x 28."""

from __future__ import annotations

from torch import nn

from experiments.models.normalized import normalized

SIDE = 28


def lenet_300_100(
    classes: int = 10, *, norm: str = "none", placement: str = "every", image_channels: int = 1
) -> nn.Sequential:
    """Two hidden layers of 300 and 100 units: 266,610 parameters without norms.

    Args:
        classes: the number of outputs.
        norm: "none", "layer", "group" or "batch".
        placement: behind which layers: "every" one, "hidden" ones, or "mod": one fewer.
        image_channels: 1 for grey.
    """
    return normalized(
        [
            nn.Flatten(),
            nn.Linear(image_channels * SIDE**2, 300),
            nn.ReLU(),
            nn.Linear(300, 100),
            nn.ReLU(),
            nn.Linear(100, classes),
        ],
        norm,
        placement,
    )


def lenet5(
    classes: int = 10, *, norm: str = "none", placement: str = "every", image_channels: int = 1
) -> nn.Sequential:
    """Convolutions of 6 and 16 channels, then 120 and 84 units: 61,706 parameters without norms.

    The layers of table 1 of Davody et al., with ReLU and maximum pools, which the table does not name.

    Args:
        classes: the number of outputs.
        norm: "none", "layer", "group" or "batch".
        placement: behind which layers: "every" one, "hidden" ones, or "mod": one fewer.
        image_channels: 1 for grey.
    """
    return normalized(
        [
            nn.Conv2d(image_channels, 6, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(400, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, classes),
        ],
        norm,
        placement,
    )
