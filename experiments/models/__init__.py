"""The papers' models by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from clipwise.errors import ConfigurationError
from clipwise.recipes.small_cnn import small_cnn
from clipwise.validation.arguments import one_of
from experiments.models.backprop_networks import backprop_cifar10, backprop_mnist
from experiments.models.bilstm import bilstm
from experiments.models.lipschitz_networks import (
    convnet3,
    convnet6,
    make_orthogonal_,
    mlp2,
    patch_convnet6,
    patch_vgg,
    shallow_vgg,
)
from experiments.models.normalized_networks import (
    bn_lenet5,
    convnet,
    lenet5,
    lenet_300_100,
    light_vgg,
    resnet18,
    tutorial_cnn,
    vgg16,
)
from experiments.models.norms import NORMS, PLACEMENTS

_MODELS: dict[str, Callable[..., nn.Module]] = {
    model.__name__: model
    for model in (
        small_cnn,
        resnet18,
        convnet,
        bn_lenet5,
        mlp2,
        convnet3,
        convnet6,
        shallow_vgg,
        patch_convnet6,
        patch_vgg,
        backprop_mnist,
        backprop_cifar10,
        lenet_300_100,
        lenet5,
        vgg16,
        light_vgg,
        tutorial_cnn,
        bilstm,
    )
}

__all__ = ["NORMS", "PLACEMENTS", "build", "make_orthogonal_", "names", *_MODELS]


def names() -> list[str]:
    """The names of all models."""
    return list(_MODELS)


def build(name: str, **options: Any) -> nn.Module:
    """A model with fresh random weights.

    Args:
        name: one of `names()`.
        options: arguments of the function of that name, such as `classes` and, for networks with a normalization,
            `norm`: "batch", "layer", "group" or "none".
    """
    one_of("model", name, _MODELS)
    known = inspect.signature(_MODELS[name])
    try:
        known.bind(**options)
    except TypeError as error:
        raise ConfigurationError(f"models.build({name!r}, ...): {error}. It takes {known}.") from None
    return _MODELS[name](**options)
