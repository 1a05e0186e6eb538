from __future__ import annotations

import numpy as np
import pytest

from clipwise.errors import ConfigurationError
from clipwise.recipes.config import Choices
from clipwise.recipes.images.formats import is_images, open_images
from clipwise.recipes.sources import open_source
from tests.recipes.images.files import idx, random_pixels, write_cifar10, write_mnist, write_png

ALL = np.arange(100)


def test_reads_idx_files_with_the_labels_beside_them(tmp_path):
    for zipped in (True, False):
        folder = tmp_path / str(zipped)
        pixels = write_mnist(folder, 5, zipped=zipped)
        images = open_images(folder)
        assert (len(images), images.side, images.channels, images.byte_labels) == (5, 8, 1, True)
        assert images.labels() == ["0", "1", "0", "1", "0"]
        np.testing.assert_allclose(images.pixels(ALL[:5], 1, 8)[:, 0].numpy() * 255, pixels, atol=1e-4)


def test_chooses_the_part_by_name(tmp_path):
    write_mnist(tmp_path, 5)
    write_mnist(tmp_path, 3, part="t10k")
    assert len(open_images(tmp_path)) == 5
    assert len(open_images(tmp_path, "test")) == 3
    assert len(open_images(tmp_path / "t10k-images-idx3-ubyte.gz")) == 3


def test_idx_without_labels_can_be_predicted(tmp_path):
    (tmp_path / "images-idx3-ubyte").write_bytes(idx(random_pixels(2, 4, 4)))
    assert open_images(tmp_path).labels() is None


@pytest.mark.parametrize("damage", [lambda b: b[:-3], lambda b: b"", lambda b: b"\x00\x00\x07\x03" + b[4:]])
def test_a_damaged_idx_file_is_named(tmp_path, damage):
    write_mnist(tmp_path, 5, zipped=False)
    file = tmp_path / "train-images-idx3-ubyte"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ConfigurationError, match=r"train-images-idx3-ubyte is not a complete idx file"):
        open_images(tmp_path)


@pytest.mark.parametrize(
    ("shape", "channels"), [((4, 6, 6), 1), ((4, 6, 6, 3), 3), ((4, 3, 6, 6), 3), ((4, 6, 6, 4), 3), ((4, 6, 6, 1), 1)]
)
def test_reads_npz_arrays_of_several_shapes(tmp_path, shape, channels):
    np.savez(tmp_path / "a.npz", images=random_pixels(*shape), labels=np.array(["ä", "b", "ä", "b"]))
    images = open_images(tmp_path / "a.npz")
    assert (images.channels, images.side, images.labels()) == (channels, 6, ["ä", "b", "ä", "b"])
    assert images.pixels(ALL[:4], channels, 6).shape == (4, channels, 6, 6)


def test_npz_with_two_parts(tmp_path):
    parts, kinds = (("train", 4), ("test", 2)), (("x", (5, 5)), ("y", ()))
    arrays = {f"{kind}_{part}": random_pixels(n, *shape) for part, n in parts for kind, shape in kinds}
    np.savez(tmp_path / "a.npz", **arrays)
    assert [len(open_images(tmp_path / "a.npz", part)) for part in ("train", "test")] == [4, 2]


def test_npz_with_labels_in_a_second_file(tmp_path):
    np.savez(tmp_path / "kmnist-train-imgs.npz", random_pixels(3, 5, 5))
    np.savez(tmp_path / "kmnist-train-labels.npz", np.array([7, 1, 7], np.uint8))
    assert open_images(tmp_path).labels() == ["7", "1", "7"]


def test_an_npz_file_of_objects_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", images=np.array([{}, 1], dtype=object))
    with pytest.raises(ConfigurationError, match="plain arrays"):
        open_images(tmp_path / "a.npz")
    (tmp_path / "b.npz").write_bytes(b"PK not a zip file")
    with pytest.raises(ConfigurationError, match=r"b\.npz cannot be read"):
        open_images(tmp_path / "b.npz")


def test_npz_labels_must_fit_the_images(tmp_path):
    np.savez(tmp_path / "a.npz", images=random_pixels(3, 5, 5), labels=np.array([0, 1]))
    with pytest.raises(ConfigurationError, match="3 images, but labels of shape"):
        open_images(tmp_path / "a.npz")


def test_npz_without_known_names(tmp_path):
    np.savez(tmp_path / "a.npz", first=random_pixels(3, 5, 5), second=random_pixels(3, 5, 5))
    with pytest.raises(ConfigurationError, match="Name them 'images' and 'labels'"):
        open_images(tmp_path / "a.npz")


def test_reads_cifar_batches(tmp_path):
    pixels = write_cifar10(tmp_path / "c")
    (tmp_path / "c" / "batches.meta.txt").write_text("\n".join(f"class{i}" for i in range(10)) + "\n")
    images = open_images(tmp_path / "c")
    assert (len(images), len(open_images(tmp_path / "c", "test"))) == (15, 3)
    assert images.names == tuple(f"class{i}" for i in range(10))
    assert images.labels()[:3] == ["class0", "class1", "class2"]
    expected = pixels.reshape(3, 3, 32, 32)
    np.testing.assert_allclose(images.pixels(ALL[:3], 3, 32).numpy() * 255, expected, atol=1e-4)


def test_cifar_100_has_fine_labels(tmp_path):
    record = np.concatenate([[3, 42], random_pixels(3072)]).astype(np.uint8)
    for name in ("train.bin", "test.bin"):
        (tmp_path / name).write_bytes(record.tobytes())
    images = open_images(tmp_path)
    assert (images.labels(), len(images.names)) == (["42"], 100)


def test_damaged_and_pickled_cifar_is_refused(tmp_path):
    write_cifar10(tmp_path / "c")
    (tmp_path / "c" / "data_batch_3.bin").write_bytes(b"123")
    with pytest.raises(ConfigurationError, match=r"data_batch_3\.bin is not a complete binary batch"):
        open_images(tmp_path / "c")
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "data_batch_1").write_bytes(b"\x80\x04.")
    with pytest.raises(ConfigurationError, match="pickles"):
        open_images(tmp_path / "p")


def test_folders_of_parts(tmp_path):
    for part, count in (("train", 2), ("test", 1)):
        for name in "ab":
            for number in range(count):
                write_png(tmp_path / part / name / f"{number}.png", random_pixels(4, 4, 3))
    assert [len(open_images(tmp_path, part)) for part in ("train", "test")] == [4, 2]


def test_unknown_paths(tmp_path):
    with pytest.raises(ConfigurationError, match="no such file"):
        open_images(tmp_path / "missing")
    (tmp_path / "a.xyz").write_text("")
    with pytest.raises(ConfigurationError, match="no known file of images"):
        open_images(tmp_path / "a.xyz")
    with pytest.raises(ConfigurationError, match="no images"):
        open_images(tmp_path)


def test_texts_are_not_taken_for_images(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.txt").write_text("text")
    assert not is_images(tmp_path)
    write_mnist(tmp_path / "m", 2)
    assert is_images(tmp_path / "m") and is_images(tmp_path / "m" / "train-images-idx3-ubyte.gz")


def test_a_text_file_beside_images_does_not_make_them_texts(tmp_path):
    write_png(tmp_path / "a" / "1.png", random_pixels(4, 4, 3))
    write_png(tmp_path / "b" / "2.png", random_pixels(4, 4, 3))
    (tmp_path / "a" / "readme.txt").write_text("text")
    source = open_source(Choices(path=str(tmp_path), epsilon=1.0))
    assert source.kind == "images" and len(source) == 2
