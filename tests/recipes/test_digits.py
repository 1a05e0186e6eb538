import runpy
import sys

import torch

from clipwise.recipes.digits import digits


def test_shapes_types_and_ranges():
    for train, size in ((True, 1437), (False, 360)):
        images, labels = digits(train=train).tensors
        assert images.shape == (size, 1, 8, 8) and images.dtype == torch.float32
        assert labels.shape == (size,) and labels.dtype == torch.int64
        assert images.min() == 0 and images.max() == 1
        assert set(labels.tolist()) == set(range(10))


def test_every_fifth_record_is_a_test_record():
    train, test = digits(train=True), digits(train=False)
    # In the original order labels begin 0, 1, 2, ..., 9, 0, 1, ...: positions 0, 5 and 10 are test records.
    assert test.tensors[1][:3].tolist() == [0, 5, 0]
    assert train.tensors[1][:8].tolist() == [1, 2, 3, 4, 6, 7, 8, 9]


def test_the_parts_share_no_image():
    seen = {image.numpy().tobytes() for image in digits(train=True).tensors[0]}
    assert not any(image.numpy().tobytes() in seen for image in digits(train=False).tensors[0])


def test_the_split_is_always_the_same():
    first, second = digits(train=True), digits(train=True)
    assert all(torch.equal(a, b) for a, b in zip(first.tensors, second.tensors, strict=True))


def test_images_look_like_their_labels():
    """The nearest mean image classifies most test digits, so images and labels match."""
    (images, labels), (test, truth) = digits(train=True).tensors, digits(train=False).tensors
    means = torch.stack([images[labels == digit].mean(0) for digit in range(10)]).flatten(1)
    guess = torch.cdist(test.flatten(1), means).argmin(1)
    assert (guess == truth).float().mean() > 0.85


def test_scikit_learn_is_not_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)  # any import of it fails
    module = runpy.run_module("clipwise.recipes.digits")  # a copy: other tests keep their classes
    assert len(module["digits"](train=True)) == 1437
