"""Files as their publishers ship them, made up here; and what is said when they are not there."""

import gzip
import struct

import numpy as np
import pytest
import torch

from clipwise.errors import ConfigurationError
from experiments import data
from experiments.data.folder import VARIABLE

RANDOM = np.random.default_rng(0)


def idx(array):
    head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return gzip.compress(head + array.tobytes())


def pixels(*shape):
    return RANDOM.integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture
def mnist(tmp_path):
    """A folder with three training images and two test images."""
    (tmp_path / "mnist").mkdir()
    made = {}
    for part, count in (("train", 3), ("t10k", 2)):
        made[part] = pixels(count, 28, 28), pixels(count) % 10
        for kind, array in zip(("images-idx3", "labels-idx1"), made[part], strict=True):
            (tmp_path / "mnist" / f"{part}-{kind}-ubyte.gz").write_bytes(idx(array))
    return tmp_path, made


@pytest.mark.parametrize(("train", "part"), [(True, "train"), (False, "t10k")])
def test_mnist(mnist, train, part):
    folder, made = mnist
    images, labels = data.images("mnist", train, folder).tensors
    assert images.dtype == torch.float32 and images.shape[1:] == (1, 28, 28)
    assert torch.equal((images[:, 0] * 255).round().to(torch.uint8), torch.from_numpy(made[part][0]))
    assert labels.dtype == torch.int64 and labels.tolist() == made[part][1].tolist()


def test_the_folder_may_come_from_the_environment(mnist, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(mnist[0]))
    assert len(data.images("mnist", train=True)) == 3


def cifar_records(count):
    return pixels(count) % 10, pixels(count, 3, 32, 32)


def test_cifar10_from_binary_batches(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    parts = {f"data_batch_{i}": cifar_records(2) for i in range(1, 6)} | {"test_batch": cifar_records(3)}
    for name, (labels, images) in parts.items():
        np.concatenate([labels[:, None], images.reshape(len(labels), -1)], 1).tofile(folder / f"{name}.bin")
    images, labels = data.images("cifar10", train=True, folder=tmp_path).tensors
    assert images.shape == (10, 3, 32, 32) and images.max() <= 1
    assert torch.equal((images[8:] * 255).round().to(torch.uint8), torch.from_numpy(parts["data_batch_5"][1]))
    assert labels[:2].tolist() == parts["data_batch_1"][0].tolist()
    assert len(data.images("cifar10", train=False, folder=tmp_path)) == 3


def test_cifar10_from_mosaics(tmp_path):
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "cifar10"
    folder.mkdir()
    labels, images = cifar_records(6)
    # 2 rows of 3 tiles, row by row.
    mosaic = images.reshape(2, 3, 3, 32, 32).transpose(0, 3, 1, 4, 2).reshape(64, 96, 3)
    image.fromarray(mosaic).save(folder / "test_batch.webp", lossless=True)
    np.savez(folder / "labels.npz", y_test=labels, y_train=labels)
    found, found_labels = data.images("cifar10", train=False, folder=tmp_path).tensors
    assert torch.equal((found * 255).round().to(torch.uint8), torch.from_numpy(images))
    assert found_labels.tolist() == labels.tolist()


def test_kmnist_has_a_test_part(tmp_path):
    (tmp_path / "kmnist").mkdir()
    np.savez(tmp_path / "kmnist" / "kmnist-test-imgs.npz", pixels(2, 28, 28))
    np.savez(tmp_path / "kmnist" / "kmnist-test-labels.npz", np.array([3, 4], np.uint8))
    assert data.images("kmnist", train=False, folder=tmp_path).tensors[1].tolist() == [3, 4]
    with pytest.raises(ConfigurationError, match="test part only"):
        data.images("kmnist", train=True, folder=tmp_path)


def test_digits_need_no_folder(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert len(data.images("digits", train=False)) == 360


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigurationError, match=f"--data DIR.*{VARIABLE}"):
        data.images("mnist", train=True)
    with pytest.raises(ConfigurationError, match="does not exist"):
        data.images("mnist", train=True, folder=tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match="holds no mnist/train-images"):
        data.images("mnist", train=True, folder=tmp_path)
    with pytest.raises(ConfigurationError, match="'imagenet' is not known"):
        data.images("imagenet", train=True, folder=tmp_path)


BROKEN = [b"", b"text", gzip.compress(b""), gzip.compress(b"\0\0\x09\1\0\0\0\1x")]


@pytest.mark.parametrize("broken", BROKEN, ids=["empty", "text", "packed nothing", "packed end"])
def test_a_broken_file_is_refused(mnist, broken):
    folder = mnist[0]
    (folder / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(broken)
    with pytest.raises(ConfigurationError, match="not a gzipped idx file"):
        data.images("mnist", train=True, folder=folder)


def test_standardisation_is_by_constants():
    look = data.look("cifar10")
    x = torch.rand(4, 3, 5, 5)
    found = look.standardised(x)
    for c in range(3):
        torch.testing.assert_close(found[:, c], (x[:, c] - look.mean[c]) / look.deviation[c])
    # The values of an image do not depend on the other images.
    assert torch.equal(look.standardised(x[:1])[0], found[0])
