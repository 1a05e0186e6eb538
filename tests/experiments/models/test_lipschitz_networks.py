"""The networks of the weight-clipping paper: sizes as it prints them, and bounds that exist."""

import math

import pytest
import torch
from torch.nn import functional as F

import clipwise
from clipwise.lipschitz import SoftmaxCrossEntropy, bounds_of, trace
from experiments import models

# name, options, shape of an example, parameters as the paper counts them
NETWORKS = [
    ("mlp2", {"features": 14}, (14,), 14 * 16 + 16 + 16 * 2 + 2),
    ("convnet3", {}, (1, 28, 28), 83_154),
    ("convnet6", {}, (1, 28, 28), 132_746),
    ("shallow_vgg", {}, (3, 32, 32), 131_466),
    ("patch_convnet6", {}, (1, 28, 28), 132_746),
    ("patch_vgg", {}, (3, 32, 32), 131_466),
]


@pytest.mark.parametrize(("name", "options", "shape", "count"), NETWORKS)
@pytest.mark.parametrize("norm", ["none", "bounded"])
def test_parameter_counts_with_and_without_bounded_norm(name, options, shape, count, norm):
    model = models.build(name, norm=norm, **options)
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.parametrize(("name", "options", "shape", "count"), NETWORKS)
@pytest.mark.parametrize("norm", ["none", "group", "bounded"])
def test_examples_are_independent(name, options, shape, count, norm):
    torch.manual_seed(0)
    model = models.build(name, norm=norm, input_norm=1.0, **options)
    batch = torch.rand(3, *shape), torch.tensor([0, 1, 0])
    assert clipwise.check(model, lambda m, x, y: F.cross_entropy(m(x), y, reduction="none"), batch).ok


@pytest.mark.parametrize(("name", "options", "shape", "count"), NETWORKS)
@pytest.mark.parametrize("norm", ["none", "bounded"])
def test_every_parameter_has_a_finite_bound(name, options, shape, count, norm):
    torch.manual_seed(0)
    model = models.build(name, norm=norm, input_norm=1.0, **options)
    network = trace(model, shape)
    bounds = bounds_of(network, SoftmaxCrossEntropy().constant(network.output_shape)).sensitivities
    assert set(bounds) == {parameter for parameter, _ in model.named_parameters()}
    assert all(math.isfinite(bound) and bound > 0 for bound in bounds.values())


def test_the_first_module_clips_inputs_on_request():
    x = torch.full((2, 5), 10.0)
    clipped = models.build("mlp2", features=5, input_norm=1.0)[0](x)
    assert torch.allclose(clipped.norm(dim=1), torch.ones(2), atol=1e-4)
    assert isinstance(models.build("mlp2", features=5)[0], torch.nn.Linear)


@pytest.mark.parametrize("groups", [1, 8, 12, 32])
def test_groups_divide_the_channels(groups):
    norm = models.build("convnet3", norm="bounded", groups=groups, alpha=0.3)[1]
    assert norm.num_channels % norm.num_groups == 0 and norm.num_groups <= groups
    assert norm.alpha == 0.3


def test_an_unknown_norm_is_refused():
    with pytest.raises(clipwise.ConfigurationError, match=r"norm='batch' is not known.*'bounded'"):
        models.build("mlp2", features=3, norm="batch")
