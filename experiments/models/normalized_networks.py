"""Networks for images with a selectable norm: LeNet, VGG, ResNet-18 and those of the papers on clipping and norms.

Common arguments: the number of `classes`, `image_channels` (1 for grey, 3 for colour) and `norm`: "none", "layer",
"group" or "batch". `placement` selects the layers with a norm: "every" layer, "hidden" layers, or "mod", all hidden
layers except the last.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from experiments.models.norms import Norm, no_norm, norm_of, normalized, without_norm

CONVNET_CHANNELS = (32, 64, 64, 128)
# Convolutions of each stage, and their channels in units of the first stage's; a pool ends a stage.
_VGG16 = ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8))
_LIGHT_VGG = ((2, 1), (2, 2), (4, 4))
_STAGES, _BLOCKS = 4, 2  # of ResNet-18


def lenet_300_100(
    classes: int = 10, *, norm: str = "none", placement: str = "every", image_channels: int = 1
) -> nn.Sequential:
    """Two hidden layers of 300 and 100 units, for images of 28 x 28: 266,610 parameters without norms."""
    return normalized([nn.Flatten(), *_linear(image_channels * 28**2, 300, 100, classes)], norm, placement)


def lenet5(
    classes: int = 10, *, norm: str = "none", placement: str = "every", image_channels: int = 1
) -> nn.Sequential:
    """Convolutions of 6 and 16 channels, then 120 and 84 units, for images of 28 x 28: 61,706 parameters without norms.

    The layers of table 1 of Davody et al., with ReLU and maximum pools, which the table does not name.
    """
    layers = [nn.Conv2d(image_channels, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return normalized([*layers, nn.Flatten(), *_linear(400, 120, 84, classes)], norm, placement)


def bn_lenet5(classes: int = 10, *, norm: str = "batch", image_channels: int = 1) -> nn.Sequential:
    """The network of table 2 of Nguyen et al., for images of 32 x 32: 61,990 parameters in 8 layers.

    Without norms it is LeNet-5 in its plain form, with 61,706 parameters. The last convolution leaves one
    position. The activation comes behind the norm; the table does not say.
    """
    make_norm = norm_of(norm)
    layers: list[nn.Module] = []
    inputs = image_channels
    for outputs in (6, 16, 120):
        layers += [nn.Conv2d(inputs, outputs, 5), make_norm(outputs), nn.Tanh(), nn.AvgPool2d(2)]
        inputs = outputs
    layers[-1] = nn.Flatten()  # in place of the last pool
    return nn.Sequential(*layers, nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, classes))


def convnet(classes: int = 10, *, norm: str = "batch", image_channels: int = 3) -> nn.Sequential:
    """The network of table 1 of Nguyen et al.: 132,042 parameters, 576 of them of norms.

    Each convolution of 3 x 3 keeps the size of its input and has a norm, ReLU and a mean pool behind it. The
    last pool is over all positions, so images may have any size from 8 x 8. The table has the activation in
    the convolution's row and does not say whether it comes before or after the norm: here it comes after.
    """
    make_norm = norm_of(norm)
    layers: list[nn.Module] = []
    inputs = image_channels
    for outputs in CONVNET_CHANNELS:
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), make_norm(outputs), nn.ReLU(), nn.AvgPool2d(2)]
        inputs = outputs
    layers[-1] = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs, classes))


def tutorial_cnn(
    classes: int = 10, *, norm: str = "none", placement: str = "every", image_channels: int = 3
) -> nn.Sequential:
    """The network of an old TensorFlow tutorial: two convolutions of 5 x 5 with 64 channels, then 384 and 384 units.

    In the form of Abadi et al. (2016), for images that are cut to 24 x 24: 1,144,138 parameters without norms.
    """
    layers = [nn.Conv2d(image_channels, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(64, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    return normalized([*layers, nn.Flatten(), *_linear(64 * 6 * 6, 384, 384, classes)], norm, placement)


def vgg16(
    classes: int = 10, *, norm: str = "batch", placement: str = "hidden", image_channels: int = 3, width: int = 64
) -> nn.Sequential:
    """VGG-16 (Simonyan and Zisserman 2014) for images of 32 x 32: 13 convolutions, then 512, 512 and the classes.

    The hidden linear layers have 512 units, as is usual for CIFAR, and not 4,096. `width` is the number of channels of
    the first stage; the linear layers have eight times as many units.
    """
    units = 8 * width
    layers = [*_convolutions(_VGG16, image_channels, width), *_linear(units, units, units, classes)]
    return normalized(layers, norm, placement)


def light_vgg(
    classes: int = 10, *, norm: str = "batch", placement: str = "every", image_channels: int = 3, width: int = 64
) -> nn.Sequential:
    """Two convolutions of 64, two of 128 and four of 256 channels with pools between, then 512 and the classes.

    This is the VGG of table 1 of Davody et al. Its details are in an appendix that was not available: kernels of 3 x 3,
    ReLU and maximum pools are those of VGG. `width` is the number of channels of the first stage.
    """
    layers = [*_convolutions(_LIGHT_VGG, image_channels, width), *_linear(4 * width, 8 * width, classes)]
    return normalized(layers, norm, placement)


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
    classes: int = 10, *, norm: str = "batch", placement: str = "hidden", image_channels: int = 3, width: int = 64
) -> nn.Sequential:
    """ResNet-18 (He et al. 2016) with a stem of 3 x 3 and without the first pool, as is usual for CIFAR.

    In its usual size it has 11,173,962 parameters in 62 tensors: 20 convolutions, the scale and shift of 20
    norms, and a linear layer. With the placement "mod" the last block has no last norm. `width` is the number of
    channels of the first stage; each further stage has twice as many.
    """
    make_norm = norm_of(norm)
    layers: list[nn.Module] = [_convolution(image_channels, width, 3, 1), make_norm(width), nn.ReLU()]
    channels = width
    for stage in range(_STAGES):
        for block in range(_BLOCKS):
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


def _convolutions(stages: tuple[tuple[int, int], ...], inputs: int, width: int) -> list[nn.Module]:
    """The convolutions of VGG: stages of 3 x 3 with ReLU and a pool, then the mean over positions."""
    layers: list[nn.Module] = []
    for count, times in stages:
        for _ in range(count):
            layers += [nn.Conv2d(inputs, times * width, 3, padding=1), nn.ReLU()]
            inputs = times * width
        layers.append(nn.MaxPool2d(2))
    return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()]


def _linear(*widths: int) -> list[nn.Module]:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return layers[:-1]
