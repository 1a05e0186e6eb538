"""Networks whose windows do not overlap: no bound of a convolution loses anything to overlaps."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from experiments.models.lipschitz_blocks import first_clip, norm_behind


def patch_convnet6(
    classes: int = 10,
    *,
    norm: str = "none",
    image_channels: int = 1,
    input_norm: float | None = None,
    groups: int = 8,
    alpha: float = 0.5,
) -> nn.Sequential:
    """Six layers and 132,746 parameters, as `convnet6`, for grey images of 28 x 28.

    A convolution whose windows overlap can be bounded by sqrt(cover) times the norm of its filters only, and random
    images are far from that: over four of them the bounds grow by hundreds. Here each window is as large as its stride:
    2 x 2, 2 x 2, 1 x 1 and 7 x 7 with 8, 24, 40 and 64 filters, which leave one position; then 72 units and the
    classes.

    Args:
        classes: the number of outputs.
        norm: behind each convolution: "none", "group" or "bounded".
        image_channels: 1 for grey.
        input_norm: begin with a clip of the inputs to this norm.
        groups: of the norms.
        alpha: the floor under the deviation, for "bounded".
    """
    layers = first_clip(input_norm)
    layers += _patches(image_channels, (8, 24, 40, 64), (2, 2, 1, 7), norm, groups, alpha)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 72), nn.ReLU(), nn.Linear(72, classes))


def patch_vgg(
    classes: int = 10,
    *,
    norm: str = "none",
    image_channels: int = 3,
    input_norm: float | None = None,
    groups: int = 8,
    alpha: float = 0.5,
) -> nn.Sequential:
    """Five layers and 131,466 parameters, as `shallow_vgg`, for images of 3 x 32 x 32; see `patch_convnet6`.

    Windows of 2 x 2, 2 x 2, 1 x 1 and 8 x 8 with 40, 32, 80 and 24 filters, and the classes.

    Args:
        classes: the number of outputs.
        norm: behind each convolution: "none", "group" or "bounded".
        image_channels: 3 for colours.
        input_norm: begin with a clip of the inputs to this norm.
        groups: of the norms.
        alpha: the floor under the deviation, for "bounded".
    """
    layers = first_clip(input_norm)
    layers += _patches(image_channels, (40, 32, 80, 24), (2, 2, 1, 8), norm, groups, alpha)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(24, classes))


def _patches(
    inputs: int, channels: Sequence[int], windows: Sequence[int], norm: str, groups: int, alpha: float
) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for outputs, window in zip(channels, windows, strict=True):
        layers += [
            nn.Conv2d(inputs, outputs, window, window),
            norm_behind(norm, outputs, groups, alpha),
            nn.ReLU(),
        ]
        inputs = outputs
    return layers
