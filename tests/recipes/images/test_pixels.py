from __future__ import annotations

import numpy as np
import pytest
import torch

from clipwise.errors import ConfigurationError
from clipwise.recipes.images.pixels import ArrayImages, FolderImages
from tests.recipes.images.files import random_pixels, write_png


def test_classes_are_the_sorted_names_of_sub_folders(tmp_path):
    for name in ("ü日本", "b", "A"):
        write_png(tmp_path / name / "1.png", random_pixels(4, 4, 3))
    (tmp_path / "b" / "notes.csv").write_text("no image")
    (tmp_path / ".hidden").mkdir()
    images = FolderImages(tmp_path)
    assert images.names == ("A", "b", "ü日本")
    assert images.labels() == ["A", "b", "ü日本"]


def test_accents_are_composed_in_one_way(tmp_path):
    write_png(tmp_path / "u\u0308" / "1.png", random_pixels(4, 4))
    assert FolderImages(tmp_path).names == ("\u00fc",)


def test_mixed_sizes_and_modes_become_squares_of_the_declared_size(tmp_path):
    write_png(tmp_path / "a" / "grey.png", random_pixels(9, 5))
    write_png(tmp_path / "a" / "alpha.png", random_pixels(3, 7, 4))
    write_png(tmp_path / "a" / "deep.png", np.full((6, 6), 65535, np.uint16))
    images = FolderImages(tmp_path)
    for channels in (1, 3):
        x = images.pixels(np.arange(3), channels, 8)
        assert x.shape == (3, channels, 8, 8) and x.min() >= 0 and x.max() <= 1
    assert torch.equal(images.pixels(np.array([1]), 1, 8), torch.ones(1, 1, 8, 8))  # 16 bits are scaled, not cut


def test_an_unreadable_image_is_named(tmp_path):
    write_png(tmp_path / "a" / "1.png", random_pixels(4, 4))
    (tmp_path / "a" / "2.jpg").write_bytes(b"no image")
    whole = (tmp_path / "a" / "1.png").read_bytes()
    (tmp_path / "a" / "3.png").write_bytes(whole[: len(whole) // 2])
    images = FolderImages(tmp_path)
    for row, name in ((1, "a/2.jpg"), (2, "a/3.png")):
        with pytest.raises(ConfigurationError, match=f"{name} cannot be read as an image"):
            images.pixels(np.array([row]), 3, 8)


def test_a_flat_folder_has_no_labels(tmp_path):
    write_png(tmp_path / "1.png", random_pixels(4, 4))
    assert FolderImages(tmp_path).labels() is None


def test_arrays_are_scaled_by_their_type_and_not_by_their_values():
    dark = ArrayImages("array", np.full((2, 4, 4), 10, np.uint8), None)
    assert torch.allclose(dark.pixels(np.arange(2), 1, 4), torch.tensor(10 / 255))
    fractions = ArrayImages("array", np.array([[[0.5, np.nan], [7.0, -1.0]]]), None)
    assert fractions.pixels(np.arange(1), 1, 2).flatten().tolist() == [0.5, 0.0, 1.0, 0.0]


def test_arrays_are_resized_and_change_their_channels():
    images = ArrayImages("array", random_pixels(2, 6, 4, 3), None)
    assert images.side == 6
    assert images.pixels(np.arange(2), 1, 5).shape == (2, 1, 5, 5)
    grey = ArrayImages("array", random_pixels(2, 4, 4), None)
    x = grey.pixels(np.arange(2), 3, 4)
    assert torch.equal(x[:, 0], x[:, 2])


@pytest.mark.parametrize("array", [np.zeros((2, 4)), np.zeros((2, 5, 5, 5)), np.zeros((2, 4, 4), dtype="U1")])
def test_other_arrays_are_refused(array):
    with pytest.raises(ConfigurationError, match="array"):
        ArrayImages("array", array, None)
