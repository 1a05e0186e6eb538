"""Sizes as the batch-clipping paper counts them, and which models may be trained how."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import clipwise
from clipwise.clipping.thresholds import group_parameters
from experiments import models

IMAGES = {"resnet18": (3, 32), "convnet": (3, 32), "bn_lenet5": (1, 32)}
OTHERS = {"small_cnn", "lenet_300_100", "lenet5", "vgg16", "light_vgg", "tutorial_cnn", "bilstm"}


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def parts(model, kind):
    return len(group_parameters(kind, dict(model.named_parameters())))


def loss(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


@pytest.mark.parametrize(
    ("name", "norm", "count"),
    [
        ("resnet18", "batch", 11_173_962),
        ("resnet18", "none", 11_173_962 - 9_600),
        ("convnet", "batch", 132_042),
        ("convnet", "none", 131_466),
        ("bn_lenet5", "batch", 61_990),
        ("bn_lenet5", "none", 61_706),
    ],
)
def test_parameter_counts(name, norm, count):
    assert parameters(models.build(name, norm=norm)) == count


@pytest.mark.parametrize("name", IMAGES)
def test_group_norm_has_as_many_parameters_as_batch_norm(name):
    assert parameters(models.build(name, norm="group")) == parameters(models.build(name, norm="batch"))


def test_the_paper_counts_62_tensors_and_8_layers():
    assert parts(models.build("resnet18"), "tensor") == 62
    assert parts(models.build("bn_lenet5"), "layer") == 8


@pytest.mark.parametrize("norm", models.NORMS)
@pytest.mark.parametrize("name", IMAGES)
def test_one_row_of_scores_per_image(name, norm):
    channels, side = IMAGES[name]
    small = {"width": 8} if name == "resnet18" else {}
    model = models.build(name, norm=norm, classes=7, **small)
    assert model(torch.rand(2, channels, side, side)).shape == (2, 7)


def test_table_1_sizes():
    """16, 8 and 4 positions per side after the first three blocks, then one."""
    sizes, x = [], torch.rand(2, 3, 32, 32)
    for layer in models.convnet():
        x = layer(x)
        if isinstance(layer, (nn.AvgPool2d, nn.AdaptiveAvgPool2d)):
            sizes.append(tuple(x.shape[1:]))
    assert sizes == [(32, 16, 16), (64, 8, 8), (64, 4, 4), (128, 1, 1)]


@pytest.mark.parametrize("name", IMAGES)
def test_without_batch_norm_examples_are_independent(name):
    channels, side = IMAGES[name]
    small = {"width": 4} if name == "resnet18" else {}
    torch.manual_seed(0)
    batch = torch.rand(3, channels, side, side), torch.arange(3)
    assert clipwise.check(models.build(name, norm="group", **small), loss, batch).ok
    assert not clipwise.check(models.build(name, norm="batch", **small), loss, batch).ok


@pytest.mark.parametrize("channels", [1, 4, 6, 16, 32, 64, 120, 512])
def test_no_group_is_a_constant(channels):
    norm = models.norms.group_norm(channels)
    assert norm.num_groups <= 32 and channels % norm.num_groups == 0
    assert channels // norm.num_groups >= min(2, channels)


def test_unknown_names_are_refused():
    with pytest.raises(clipwise.ConfigurationError, match=r"'resnet19' is not known.*'resnet18'"):
        models.build("resnet19")
    with pytest.raises(clipwise.ConfigurationError, match=r"norm='instance' is not known.*'group'"):
        models.build("convnet", norm="instance")


def test_missing_and_unknown_options_are_refused_by_name():
    with pytest.raises(clipwise.ConfigurationError, match=r"'mlp2'.*'features'"):
        models.build("mlp2")
    with pytest.raises(clipwise.ConfigurationError, match=r"'convnet3'.*'depth'"):
        models.build("convnet3", depth=3)


def test_every_model_has_a_name():
    assert set(models.names()) >= {*OTHERS, *IMAGES}
