"""The networks of the paper on backpropagation clipping: sizes, shapes, options."""

import pytest
import torch

from clipwise.errors import ConfigurationError
from experiments import models


def parameters(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 18_752),
        ({"bias": True}, 18_752 + 16 + 32 + 32 + 10),
        ({"padding": True, "bias": True}, 26_010),
        ({"padding": True, "bias": True, "activation": "tanh"}, 26_010),
        ({"norm": "group"}, 18_752 + 2 * (16 + 32)),
    ],
)
def test_mnist(options, count):
    model = models.build("backprop_mnist", **options)
    assert parameters(model) == count
    assert model(torch.rand(2, 1, 28, 28)).shape == (2, 10)


def test_cifar10_as_printed_has_a_layer_of_29_million_weights():
    with torch.device("meta"):
        model = models.build("backprop_cifar10")
        assert model(torch.rand(2, 3, 32, 32)).shape == (2, 10)
    assert max(p.numel() for p in model.parameters()) == 256 * 256 * 21 * 21
    assert all(name.endswith("weight") for name, _ in model.named_parameters())


def test_cifar10_with_pools_of_stride_two():
    model = models.build("backprop_cifar10", pool_stride=2, padding=True, bias=True, classes=7)
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 7)
    assert parameters(model) < 2_000_000
    normalized = models.build("backprop_cifar10", pool_stride=2, padding=True, bias=True, classes=7, norm="group")
    assert normalized(torch.rand(2, 3, 32, 32)).shape == (2, 7)
    assert parameters(normalized) - parameters(model) == 2 * 2 * (32 + 64 + 128 + 256)


def test_what_cannot_be_built_is_refused():
    with pytest.raises(ConfigurationError, match="padding=True"):
        models.build("backprop_cifar10", pool_stride=2)
    with pytest.raises(ConfigurationError, match="pool_stride=3"):
        models.build("backprop_cifar10", pool_stride=3)
    with pytest.raises(ConfigurationError, match="activation='gelu'"):
        models.build("backprop_mnist", activation="gelu")
