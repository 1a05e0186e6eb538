"""The networks of the normalization paper: sizes, where their norms are, and which of them keep examples apart."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import clipwise
from clipwise.errors import ConfigurationError
from experiments import models

# Image channels, side, trainable layers, and options that make it small.
IMAGES = {
    "lenet_300_100": (1, 28, 3, {}),
    "lenet5": (1, 28, 5, {}),
    "vgg16": (3, 32, 16, {"width": 4}),
    "light_vgg": (3, 32, 10, {"width": 4}),
    "tutorial_cnn": (3, 24, 5, {}),
    "resnet18": (3, 32, 21, {"width": 4}),
}
NORM_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm)


def count(model, *kinds):
    return sum(isinstance(m, kinds) for m in model.modules())


def loss(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("lenet_300_100", 266_610),
        ("lenet5", 61_706),
        ("tutorial_cnn", 1_144_138),
        ("light_vgg", 2_462_282),
        ("vgg16", 15_245_130),
    ],
)
def test_parameter_counts_without_norms(name, parameters):
    assert sum(p.numel() for p in models.build(name, norm="none").parameters()) == parameters


@pytest.mark.parametrize(("placement", "bare"), [("every", 0), ("hidden", 1), ("mod", 2)])
@pytest.mark.parametrize("norm", ["batch", "group", "layer"])
@pytest.mark.parametrize("name", IMAGES)
def test_a_norm_behind_each_layer_but_the_last_ones(name, norm, placement, bare):
    channels, side, trainable, small = IMAGES[name]
    model = models.build(name, norm=norm, placement=placement, classes=7, **small)
    assert count(model, nn.Linear, nn.Conv2d) == trainable
    assert count(model, *NORM_LAYERS) == trainable - bare
    assert model(torch.rand(2, channels, side, side)).shape == (2, 7)


def test_mod_takes_the_norm_before_the_scores_away():
    model = models.build("vgg16", placement="mod", width=4)
    kinds = [type(m) for m in model][-5:]
    assert kinds == [nn.BatchNorm1d, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]
    assert isinstance(models.build("resnet18", placement="mod", width=4)[-4].norm2, nn.Identity)


def test_a_bias_that_does_nothing_is_left_out():
    """Batch norm takes a constant away; other norms mix channels, and there it matters."""
    model = models.build("lenet5", norm="batch", placement="hidden")
    biases = [m.bias is not None for m in model if isinstance(m, (nn.Linear, nn.Conv2d))]
    assert biases == [False, False, False, False, True]
    assert all(
        m.bias is not None for m in models.build("lenet5", norm="group") if isinstance(m, (nn.Linear, nn.Conv2d))
    )


@pytest.mark.parametrize("norm", ["none", "group", "layer", "batch"])
@pytest.mark.parametrize("name", ["lenet_300_100", "lenet5", "light_vgg"])
def test_only_batch_norm_mixes_images(name, norm):
    channels, side, _, small = IMAGES[name]
    torch.manual_seed(0)
    batch = torch.rand(3, channels, side, side), torch.arange(3)
    assert clipwise.check(models.build(name, norm=norm, **small), loss, batch).ok == (norm != "batch")


@pytest.mark.parametrize("trains_words", [True, False])
@pytest.mark.parametrize("norm", ["none", "group", "layer", "batch"])
def test_only_batch_norm_mixes_texts(norm, trains_words):
    """Behind frozen word vectors no gradient shows a coupling: `check` replaces a text and compares."""
    torch.manual_seed(0)
    ids = torch.randint(1, 50, (4, 9))
    ids[0, 5:] = 0
    model = models.build("bilstm", norm=norm, words=50, width=6, units=8, trains_words=trains_words)
    assert clipwise.check(model, loss, (ids, torch.arange(4))).ok == (norm != "batch")


def test_a_text_is_the_mean_over_its_words():
    """A text without words is a constant, and what is filled up does not count in the mean."""
    torch.manual_seed(0)
    model = models.bilstm(words=50, width=6, units=8)
    states, _ = model.lstm(model.words(torch.tensor([[3, 4, 0, 0]])))
    expected = model.dense(states[:, :2].mean(1))
    torch.testing.assert_close(model(torch.tensor([[3, 4, 0, 0]])), expected)
    assert model(torch.zeros(1, 4, dtype=torch.long)).isfinite().all()


@pytest.mark.parametrize(("placement", "norms"), [("every", 2), ("hidden", 1), ("mod", 0)])
def test_norms_of_the_bilstm(placement, norms):
    assert count(models.build("bilstm", norm="group", placement=placement, words=9), nn.GroupNorm) == norms


@pytest.mark.parametrize("units", [4, 10, 84, 100, 120, 300, 384, 512])
def test_groups_of_a_linear_layer_have_values_to_normalize(units):
    norm = models.norms.norm_of("group", positions=False)(units)
    assert units % norm.num_groups == 0 and units // norm.num_groups >= min(8, units)


def test_unknown_placements_are_refused():
    with pytest.raises(ConfigurationError, match=r"placement='last' is not known.*'hidden'"):
        models.build("lenet5", placement="last")
