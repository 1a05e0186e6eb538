"""Opens images by the format that their files show: a folder of classes, idx, npz, or CIFAR's binary version."""

from __future__ import annotations

import gzip
import math
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipwise.errors import ConfigurationError
from clipwise.recipes.images.pixels import SUFFIXES, ArrayImages, FolderImages, Images

_PARTS = {"train": ("train", "training"), "test": ("test", "t10k", "val", "valid", "validation")}
_CIFAR = {  # binary version: files of each part, label bytes before the pixels, the file of names
    10: ([f"data_batch_{i}.bin" for i in range(1, 6)], ["test_batch.bin"], 1, "batches.meta.txt"),
    100: (["train.bin"], ["test.bin"], 2, "fine_label_names.txt"),
}
_CIFAR_PIXELS = 3 * 32 * 32
_IMAGE_KEYS = ("images", "imgs", "image", "x", "data")
_LABEL_KEYS = ("labels", "label", "targets", "target", "y")


def is_images(path: Path) -> bool:
    """Whether the path is a folder with images or arrays, beside which other files do not matter; or such a file."""
    if path.is_dir():
        return any(is_images(file) or file.suffix.lower() in SUFFIXES for file in path.rglob("*") if file.is_file())
    return path.suffix == ".npz" or _is_idx_name(path) or (path.suffix == ".bin" and path.is_file())


def open_images(path: Path, part: str = "train") -> Images:
    """Open a folder or file.

    Args:
        path: of the images. A file's labels may be beside it, as MNIST has them.
        part: "train" or "test", where the layout has both.
    """
    if not path.exists():
        raise ConfigurationError(f"{path.name}: there is no such file or folder.")
    if path.is_file():
        return _file(path, part)
    for classes in _CIFAR:
        if (path / _CIFAR[classes][0][0]).is_file():
            return _cifar(path, classes, part)
    if any(path.glob("data_batch_[1-5]")) or (path / "meta").is_file():
        raise ConfigurationError(
            f"{path.name}: this is CIFAR's Python version, whose files are pickles and could run code. Get the binary "
            "version (*.bin)."
        )
    arrays = [file for file in sorted(path.iterdir()) if _is_idx_name(file) or file.suffix == ".npz"]
    images = [file for file in arrays if not _is_label_name(file.name)]
    if images:
        return _file(_of_part(images, part), part)
    folders = {entry.name.lower(): entry for entry in path.iterdir() if entry.is_dir() and entry.name[0] != "."}
    if folders and set(folders) <= {name for names in _PARTS.values() for name in names}:
        return FolderImages(_of_part(sorted(folders.values()), part))
    return FolderImages(path)


def _of_part(paths: Iterable[Path], part: str) -> Path:
    """The path whose name belongs to the part; the only one if there is only one."""
    paths = list(paths)
    chosen = [path for path in paths if any(name in path.name.lower() for name in _PARTS[part])]
    if len(paths) == 1:
        return paths[0]
    if len(chosen) != 1:
        raise ConfigurationError(
            f"{paths[0].parent.name}: {len(paths)} files or folders may be the images. Name one of them instead of the "
            "folder."
        )
    return chosen[0]


def _file(file: Path, part: str) -> Images:
    if file.suffix == ".npz":
        return _npz(file, part)
    if file.suffix == ".bin":
        return _cifar(file.parent, 100 if file.name in ("train.bin", "test.bin") else 10, part, only=file)
    if not _is_idx_name(file):
        raise ConfigurationError(
            f"{file.name}: this is no known file of images. Known are idx files, .npz, CIFAR's binary batches (.bin), "
            "and folders with one sub-folder of image files for each class."
        )
    beside = _label_file(file)
    labels = None if beside is None else _read_idx(beside)
    pixels = _read_idx(file)
    if pixels.ndim != 3 or pixels.dtype != np.uint8:
        raise ConfigurationError(f"{file.name}: images of an idx file are bytes with three axes.")
    byte_labels = labels is not None and labels.dtype == np.uint8
    return ArrayImages(f"idx file {file.name}", pixels, labels, byte_labels=byte_labels)


def _label_file(file: Path) -> Path | None:
    """The file of labels beside a file of images: train-labels-idx1-ubyte beside train-images-idx3-ubyte."""
    for image, label in (("images", "labels"), ("imgs", "labels")):
        name = file.name.replace(image, label).replace("idx3", "idx1")
        for found in (file.with_name(name), file.with_name(name.removesuffix(".gz")), file.with_name(f"{name}.gz")):
            if name != file.name and found.is_file():
                return found
    return None


def _is_idx_name(file: Path) -> bool:
    name = file.name.lower().removesuffix(".gz")
    return file.is_file() and (name.endswith((".idx", "-ubyte")) or "idx3" in name or "idx1" in name)


def _is_label_name(name: str) -> bool:
    return "labels" in name.lower() or "idx1" in name.lower()


def _read_idx(file: Path) -> NDArray[Any]:
    """Two zero bytes, the type, the number of axes, the length of each axis as a big-endian word, then the values."""
    types = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
    try:
        raw = file.read_bytes()
        raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        zeros, kind, axes = struct.unpack_from(">HBB", raw)
        shape = struct.unpack_from(f">{axes}I", raw, 4)
        values = np.frombuffer(raw, types[kind], offset=4 + 4 * axes)
        if zeros == 0 and axes > 0 and len(values) == math.prod(shape):
            return values.reshape(shape)
    except (OSError, EOFError, struct.error, ValueError, KeyError, zlib.error):
        pass
    raise ConfigurationError(f"{file.name} is not a complete idx file: download it again.")


def _npz(file: Path, part: str) -> Images:
    arrays = _arrays(file)
    pixels = _find(arrays, _IMAGE_KEYS, part)
    labels = _find(arrays, _LABEL_KEYS, part)
    beside = _label_file(file)
    if pixels is None and len(arrays) == 1:
        pixels = next(iter(arrays.values()))
    if labels is None and beside is not None and len(found := _arrays(beside)) == 1:
        labels = next(iter(found.values()))
    if pixels is None:
        raise ConfigurationError(
            f"{file.name}: no array in it is named as images are. Name them 'images' and 'labels', or 'x_train', "
            "'y_train', 'x_test' and 'y_test'."
        )
    if labels is not None:
        labels = labels.reshape(len(labels)) if labels.size == len(labels) else labels
        if labels.dtype.kind not in "uibUS":
            raise ConfigurationError(
                f"{file.name}: the labels have the type {labels.dtype}: store whole numbers or text."
            )
        labels = np.char.decode(labels, "utf-8") if labels.dtype.kind == "S" else labels
    return ArrayImages(
        f"npz file {file.name}", pixels, labels, byte_labels=labels is not None and labels.dtype == np.uint8
    )


def _arrays(file: Path) -> dict[str, NDArray[Any]]:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigurationError(
            f"{file.name} cannot be read as an .npz file of plain arrays: download it again, or save it without "
            "objects."
        ) from error


def _find(arrays: Mapping[str, NDArray[Any]], keys: tuple[str, ...], part: str) -> NDArray[Any] | None:
    """The array whose name has the part ("x_train", "train_images"), else that without a part ("images")."""
    named = {name.lower(): array for name, array in arrays.items()}
    ends = [f"{key}_{word}" for word in _PARTS[part] for key in keys]
    starts = [f"{word}_{key}" for word in _PARTS[part] for key in keys]
    return next((named[name] for name in [*ends, *starts, *keys] if name in named), None)


def _cifar(folder: Path, classes: int, part: str, only: Path | None = None) -> Images:
    train, test, before, names_file = _CIFAR[classes]
    names = train if part == "train" or not (folder / test[0]).is_file() else test
    files = [folder / name for name in names] if only is None else [only]
    records = []
    for file in files:
        if not file.is_file():
            raise ConfigurationError(f"{folder.name}: {file.name} is missing. Unpack CIFAR's binary version again.")
        raw = np.fromfile(file, np.uint8)
        if len(raw) == 0 or len(raw) % (before + _CIFAR_PIXELS):
            raise ConfigurationError(
                f"{file.name} is not a complete binary batch of CIFAR-{classes}: download it again."
            )
        records.append(raw.reshape(-1, before + _CIFAR_PIXELS))
    found = np.concatenate(records)
    meta = folder / names_file
    texts = meta.read_text(encoding="utf-8").split() if meta.is_file() else []
    labels = tuple(texts) if len(texts) == classes else tuple(map(str, range(classes)))
    pixels = found[:, before:].reshape(-1, 3, 32, 32)
    return ArrayImages(f"CIFAR-{classes} binary batches", pixels, found[:, before - 1], labels)
