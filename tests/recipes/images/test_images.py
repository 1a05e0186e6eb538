from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import clipwise
from clipwise.errors import ConfigurationError
from clipwise.noise.key import NoiseKey
from clipwise.recipes.counts import NoisedCounts
from clipwise.recipes.images import ImageEncoder, ImageSource
from clipwise.recipes.images.defaults import MODELS
from tests.recipes.images.files import random_pixels, write_cifar10, write_mnist, write_png


@pytest.fixture
def mnist(tmp_path):
    write_mnist(tmp_path, 40)
    write_mnist(tmp_path, 6, part="t10k")
    return tmp_path


def without_noise() -> NoisedCounts:
    return NoisedCounts(0.0, lambda event: None, delta=0.1)


def test_labels_of_idx_files_are_released_as_noised_counts(mnist):
    source = ImageSource(mnist)
    events = []
    counts = NoisedCounts(1.0, events.append, delta=0.0, key=NoiseKey.from_seed(0))
    assert source.needs_counts()
    encoder = source.prepare(np.arange(40), counts)
    assert encoder.task.labels == ("0", "1")
    assert len(events) == 1 and "noised counts" in " ".join(encoder.preprocessing)


def test_only_the_given_rows_are_counted(mnist):
    with pytest.raises(ConfigurationError, match="fewer than two labels"):
        ImageSource(mnist).prepare(np.arange(0, 40, 2), without_noise())


def test_declared_labels_need_no_counts(mnist):
    source = ImageSource(mnist, labels=["1", "0"])
    assert not source.needs_counts()
    encoder = source.prepare(np.arange(40), None)
    assert encoder.task.labels == ("1", "0")
    assert encoder.encode(source, np.arange(3)).tensors[1].tolist() == [1, 0, 1]


def test_sub_folders_are_public_and_the_statement_states_it(tmp_path):
    for name in ("a", "ä"):
        write_png(tmp_path / name / "1.png", random_pixels(4, 4, 3))
    source = ImageSource(tmp_path, image_size=8)
    assert not source.needs_counts()
    encoder = source.prepare(np.arange(2), None)
    assert encoder.task.labels == ("a", "ä")
    assert "names of the sub-folders, which are taken as public" in encoder.preprocessing[0]


def test_one_class_is_refused(tmp_path):
    write_png(tmp_path / "a" / "1.png", random_pixels(4, 4, 3))
    with pytest.raises(ConfigurationError, match="at least two are needed"):
        ImageSource(tmp_path).prepare(np.arange(1), None)


def test_images_without_labels_can_be_predicted_but_not_learned(tmp_path):
    write_png(tmp_path / "1.png", random_pixels(4, 4, 3))
    source = ImageSource(tmp_path, image_size=8)
    encoder = ImageEncoder(("a", "b"), 3, 8)
    assert len(encoder.inputs(source)[0]) == 1
    with pytest.raises(ConfigurationError, match="no labels"):
        source.prepare(np.arange(1), None)
    with pytest.raises(ConfigurationError, match="no labels"):
        encoder.encode(source)


def test_the_size_is_public(tmp_path, mnist):
    write_png(tmp_path / "images" / "a" / "1.png", random_pixels(90, 60, 3))
    assert ImageSource(tmp_path / "images").image_size == 32
    assert ImageSource(mnist).image_size == 8
    np.savez(tmp_path / "large.npz", images=random_pixels(2, 100, 80))
    assert ImageSource(tmp_path / "large.npz").image_size == 64
    assert ImageSource(tmp_path / "large.npz", image_size=100).image_size == 100


def test_open_takes_the_test_part(mnist):
    encoder = ImageSource(mnist, labels="01").prepare(np.arange(40), None)
    assert len(encoder.open(mnist)) == 6


def test_unknown_labels_are_marked_and_have_no_loss(mnist):
    source = ImageSource(mnist, labels=["1", "7"])
    encoder = source.prepare(np.arange(40), None)
    x, y = encoder.encode(source, np.arange(2)).tensors
    assert y.tolist() == [-1, 0]
    losses = encoder.loss(encoder.model("scattering")(x), y)
    assert losses.tolist() == pytest.approx([0, np.log(2)])


@pytest.mark.parametrize("name", MODELS)
def test_round_trip_and_one_loss_per_image(name):
    encoder = ImageEncoder(("a", "ü"), 3, 16, ("declared",)).for_model(name)
    again = ImageEncoder.from_dict(json.loads(json.dumps(encoder.to_dict())))
    assert again == encoder
    x, y = again.synthetic(3).tensors
    losses = again.loss(again.model(name)(x), y)
    assert losses.shape == (3,) and losses.isfinite().all()


@pytest.mark.parametrize("name", [m if m != "wrn-16-4" else pytest.param(m, marks=pytest.mark.slow) for m in MODELS])
def test_the_models_keep_images_apart(name):
    encoder = ImageEncoder(("a", "b"), 1, 20).for_model(name)
    model = encoder.model(name)
    found = clipwise.check(model, lambda model, x, y: encoder.loss(model(x), y), encoder.synthetic(4).tensors)
    assert found, str(found)


def test_a_model_needs_its_encoding():
    with pytest.raises(ConfigurationError, match="for_model"):
        ImageEncoder(("a", "b"), 1, 16).model("tanh-cnn")
    with pytest.raises(ConfigurationError, match="model"):
        ImageEncoder(("a", "b"), 1, 16).for_model("resnet")


def test_encoding_is_the_same_for_all_subsets_of_rows(mnist):
    source = ImageSource(mnist, labels="01")
    encoder = source.prepare(np.arange(40), None)
    rows = np.array([5, 2])
    whole, some = encoder.encode(source).tensors[0], encoder.encode(source, rows).tensors[0]
    torch.testing.assert_close(some, whole[rows], rtol=0.02, atol=0.002)


def test_views_crop_pixels_and_flip_colour_images():
    encoder = ImageEncoder(("a", "b"), 3, 16)
    assert encoder.views(4) is None  # features
    views = encoder.for_model("wrn-16-4").views(4)
    assert views.of(torch.rand(2, 3, 16, 16)).shape == (8, 3, 16, 16)
    assert encoder.for_model("wrn-16-4").views(1) is None


@pytest.mark.parametrize("rows", [2, 50, 60_000])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0, float("inf")])
@pytest.mark.parametrize("model", [None, *MODELS])
def test_defaults_are_possible(rows, epsilon, model, mnist):
    for preset in ("fast", "best"):
        settings = ImageSource(mnist, model=model).defaults(rows, epsilon, preset)
        assert 1 <= settings.batch_size <= rows
        assert settings.learning_rate > 0 and settings.epochs > 0


def test_trains_privately_on_cifar_batches(tmp_path):
    write_cifar10(tmp_path / "c", rows=8)
    source = ImageSource(tmp_path / "c", grey=True, image_size=8)
    encoder = source.prepare(np.arange(40), None)
    model = encoder.model("scattering")
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    before = model.linear.weight.clone()
    with clipwise.make_private(
        model, optimizer, encoder.encode(source), batch_size=20, steps=2, noise_multiplier=1.0, delta=1e-5, seed=0
    ) as private:
        for x, y in private.loader:
            private.step(encoder.loss(model(x), y) if len(x) else None)
    assert not torch.equal(before, model.linear.weight)
