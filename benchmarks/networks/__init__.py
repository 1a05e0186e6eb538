"""The measured networks, in plain torch, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from benchmarks.networks.attention import GPT2, VisionTransformer
from benchmarks.networks.convolutional import RESNETS, VGGS, FrozenBatchNorm2d, Norm, group_norm, resnet, vgg
from benchmarks.networks.small import Reader, RowReader, cnn, even_mlp, mlp
from benchmarks.networks.trained_parts import train_only
from benchmarks.shapes import Shape
from clipwise.errors import ConfigurationError
from clipwise.recipes.images.networks import wide_resnet

__all__ = ["build", "names", "train_only"]

DEPTHS = (2, 4, 6, 8)
WIDTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
_NORMS: dict[str, Norm] = {"": FrozenBatchNorm2d, "-groupnorm": group_norm}

# From the data's shape to a network. "mlp-4" has four hidden layers, "mlp-4x1024" four of that width; "resnet18"
# and "vgg11" have frozen batch norm, "resnet18-groupnorm" group norm; "-32" is the usual form for images of
# 32 x 32.
_NETWORKS: dict[str, Callable[[Any], nn.Module]] = {
    **{f"mlp-{depth}": partial(mlp, depth=depth) for depth in DEPTHS},
    "cnn": cnn,
    "rnn": partial(RowReader, layer=nn.RNN),
    "lstm": partial(RowReader, layer=nn.LSTM),
    "transformer": Reader,
    **{
        f"resnet{layers}{suffix}": partial(resnet, layers=layers, norm=norm)
        for layers in RESNETS
        for suffix, norm in _NORMS.items()
    },
    **{
        f"vgg{layers}{suffix}": partial(vgg, layers=layers, norm=norm)
        for layers in VGGS
        for suffix, norm in _NORMS.items()
    },
    "resnet18-groupnorm-32": partial(resnet, layers=18, norm=group_norm, small_images=True),
    "vgg11-groupnorm-32": partial(vgg, layers=11, norm=group_norm, small_images=True),
    **{f"mlp-4x{width}": partial(even_mlp, depth=4, width=width) for width in WIDTHS},
    "wrn-16-4": lambda images: wide_resnet(images.channels, images.classes),
    "vit-b16": VisionTransformer,
    "vit-tiny": partial(VisionTransformer, patch=4, width=192, heads=3),
    "gpt2-small": GPT2,
    "gpt2-small-untied": partial(GPT2, tied=False),
    "gpt2-mini": partial(GPT2, width=256, depth=4, heads=4),
}


def names() -> list[str]:
    """Every network that `build` accepts."""
    return list(_NETWORKS)


def build(name: str, shape: Shape) -> nn.Module:
    """A network with fresh random weights, for data of this shape."""
    if name not in _NETWORKS:
        raise ConfigurationError(f"model={name!r} is not known: use one of {', '.join(_NETWORKS)}.")
    return _NETWORKS[name](shape)
