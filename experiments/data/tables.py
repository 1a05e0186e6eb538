"""Seven tables by name, as tensors, with a fixed test part."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from clipwise.errors import ConfigurationError
from experiments.data.columns import columns
from experiments.data.encoding import Column
from experiments.data.schemas import SCHEMAS, Schema, schema

TEST_SHARE = 0.2


@dataclass(frozen=True)
class Table:
    """One table, split in two.

    Attributes:
        train, test: features, float32 [N, D], numbers in [-1, 1] and levels one-hot, and labels, int64 [N].
        features: the names of the D features.
        classes: the names of the labels.
        input_norm: a public norm for clipping inputs: sqrt(sum of the typical square of each column). It depends only
            on the kinds of the columns.
        note: a remark for readers of results, or empty.
    """

    train: TensorDataset
    test: TensorDataset
    features: tuple[str, ...]
    classes: tuple[str, ...]
    input_norm: float
    note: str = ""


def names() -> list[str]:
    """Every table that `table` accepts."""
    return list(SCHEMAS)


def table(name: str, folder: str | os.PathLike[str] | None = None, seed: int = 0) -> Table:
    """A table, encoded by its public schema. A fifth of it, drawn from the seed, is for testing.

    Args:
        name: "adult", "naticusdroid", "breast_cancer", "credit_default", "students_dropout", "german_credit" or
            "nursery".
        folder: of the data sets; by default that of the environment variable CLIPWISE_DATA.
        seed: of the test part, which depends only on positions.
    """
    about = schema(name)
    raw = _joined([columns(file, folder) for file in about.files])
    labels = _labels(raw, about, name)
    kinds = dict(_kinds(raw, about, name))
    x_ND = np.concatenate([kind.encoded(raw[column]) for column, kind in kinds.items()], axis=1)
    everything = TensorDataset(torch.from_numpy(x_ND), torch.from_numpy(labels))
    train, test = cut(everything, TEST_SHARE, seed)
    return Table(
        train,
        test,
        tuple(f for column, kind in kinds.items() for f in kind.names(column)),
        about.classes,
        math.sqrt(sum(kind.typical_square for kind in kinds.values())),
        about.note,
    )


def cut(dataset: TensorDataset, share: float, seed: int) -> tuple[TensorDataset, TensorDataset]:
    """The rest, and a share of the records. It depends only on positions, so it costs no privacy."""
    count = len(dataset)
    # numpy guarantees the output of a bit generator, so this order is the same everywhere.
    order = np.argsort(np.random.Philox(key=seed).random_raw(count), kind="stable")
    is_cut = torch.zeros(count, dtype=torch.bool)
    is_cut[torch.from_numpy(order[: round(share * count)])] = True
    rest, taken = (TensorDataset(*(tensor[chosen] for tensor in dataset.tensors)) for chosen in (~is_cut, is_cut))
    return rest, taken


def _joined(parts: list[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _kinds(raw: dict[str, NDArray[Any]], about: Schema, name: str) -> Iterator[tuple[str, Column]]:
    for column in about.columns:
        if column not in raw:
            raise ConfigurationError(f"Table {name!r} has no column {column!r}: this is another table.")
    for column in raw:
        kind = about.columns.get(column, about.others)
        if column != about.label and kind is not None:
            yield column, kind


def _labels(raw: dict[str, NDArray[Any]], about: Schema, name: str) -> NDArray[np.int64]:
    if about.label not in raw:
        raise ConfigurationError(f"Table {name!r} has no column {about.label!r}: this is another table.")
    values = raw[about.label]
    text = np.array([f"{v:g}" for v in values]) if values.dtype.kind == "f" else values
    hits = text[:, None] == np.array(about.classes)[None]
    if not hits.any(1).all():
        raise ConfigurationError(
            f"Table {name!r}: column {about.label!r} holds labels that are none of {', '.join(about.classes)}."
        )
    found: NDArray[np.int64] = hits.argmax(1).astype(np.int64)
    return found
