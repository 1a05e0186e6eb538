"""From a model's name to the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from clipwise.errors import ConfigurationError
from clipwise.recipes.small_cnn import small_cnn
from clipwise.validation.arguments import one_of
from experiments.models.backprop_nets import backprop_cifar10, backprop_mnist
from experiments.models.bilstm import bilstm
from experiments.models.bn_lenet5 import bn_lenet5
from experiments.models.convnet import convnet
from experiments.models.convnet3 import convnet3
from experiments.models.convnet6 import convnet6
from experiments.models.lenet import lenet5, lenet_300_100
from experiments.models.mlp2 import mlp2
from experiments.models.patches import patch_convnet6, patch_vgg
from experiments.models.resnet18 import resnet18
from experiments.models.shallow_vgg import shallow_vgg
from experiments.models.tutorial_cnn import tutorial_cnn
from experiments.models.vgg import light_vgg, vgg16

_MODELS: dict[str, Callable[..., nn.Module]] = {
    "small_cnn": small_cnn,
    "resnet18": resnet18,
    "convnet": convnet,
    "bn_lenet5": bn_lenet5,
    "mlp2": mlp2,
    "convnet3": convnet3,
    "convnet6": convnet6,
    "shallow_vgg": shallow_vgg,
    "patch_convnet6": patch_convnet6,
    "patch_vgg": patch_vgg,
    "backprop_mnist": backprop_mnist,
    "backprop_cifar10": backprop_cifar10,
    "lenet_300_100": lenet_300_100,
    "lenet5": lenet5,
    "vgg16": vgg16,
    "light_vgg": light_vgg,
    "tutorial_cnn": tutorial_cnn,
    "bilstm": bilstm,
}


def names() -> list[str]:
    """Every model that `build` knows."""
    return list(_MODELS)


def build(name: str, **options: Any) -> nn.Module:
    """A model with fresh random weights.

    Args:
        name: one of `names()`.
        options: those of the function of that name, such as `classes`; for the networks with a normalization also
            `norm`: "batch", "layer", "group" or "none".
    """
    one_of("model", name, _MODELS)
    known = inspect.signature(_MODELS[name])
    try:
        known.bind(**options)
    except TypeError as error:
        raise ConfigurationError(f"models.build({name!r}, ...): {error}. It takes {known}.") from None
    return _MODELS[name](**options)
