"""ResNet-18 in the form for images of 32 x 32."""

from __future__ import annotations

from torch import Tensor, nn

from experiments.models.normalized import without_norm
from experiments.models.norms import Norm, no_norm, norm_of

STAGES, BLOCKS = 4, 2


class Residual(nn.Module):
    """Two convolutions of 3 x 3 beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1, self.norm1 = _convolution(inputs, outputs, 3, stride), norm(outputs)
        self.conv2, self.norm2 = _convolution(outputs, outputs, 3, 1), norm(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(_convolution(inputs, outputs, 1, stride), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both, rectified."""
        branch = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (branch + self.shortcut(x)).relu()  # type: ignore[no-any-return]


def resnet18(
    classes: int = 10,
    *,
    norm: str = "batch",
    placement: str = "hidden",
    image_channels: int = 3,
    width: int = 64,
) -> nn.Sequential:
    """ResNet-18 (He et al. 2016) with a stem of 3 x 3 and without the first pool, as is usual for CIFAR.

    In its usual size it has 11,173,962 parameters in 62 tensors: 20 convolutions, the scale and shift of 20
    norms, and a linear layer.

    Args:
        classes: the number of outputs.
        norm: "batch", "layer", "group" or "none".
        placement: "hidden", as usual; "every": behind the linear layer too; "mod": without the last block's last norm.
        image_channels: 3 for colour.
        width: channels of the first stage; each further stage has twice as many.
    """
    make_norm = norm_of(norm)
    layers: list[nn.Module] = [_convolution(image_channels, width, 3, 1), make_norm(width), nn.ReLU()]
    channels = width
    for stage in range(STAGES):
        for block in range(BLOCKS):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Residual(channels, width << stage, stride, make_norm))
            channels = width << stage
    bare = without_norm(placement)
    if bare == 2:
        layers[-1].norm2 = no_norm(channels)
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers, *([norm_of(norm, positions=False)(classes)] if bare == 0 else []))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
