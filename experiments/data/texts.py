"""Sets of texts by name, as ids of words.

A vocabulary made from private texts would be a release of its own. Words are hashed into a fixed number of buckets
instead, by a public function: nothing here is learned from any text.
"""

from __future__ import annotations

import os
import re
import zlib

import torch
from torch.utils.data import TensorDataset

from clipwise.validation.arguments import one_of
from experiments.data.columns import columns

BUCKETS, LENGTH, PADDING = 2**14, 64, 0
# File names without their ends: for training, for testing.
_FILES = {"ag_news": ("ag_news_train10k", "ag_news_test"), "imdb": ("imdb_train", "imdb_test")}
_TEXT_COLUMNS = ("title", "description", "text")


def encode(text: str, *, length: int = LENGTH, buckets: int = BUCKETS) -> list[int]:
    """The buckets of the first words of a text, filled up with 0; no word falls into bucket 0."""
    words = re.findall(r"[a-z0-9']+", text.lower().replace("<br />", " "))[:length]
    ids = [1 + zlib.crc32(word.encode()) % (buckets - 1) for word in words]
    return ids + [PADDING] * (length - len(ids))


def raw_texts(name: str, train: bool, folder: str | os.PathLike[str] | None = None) -> tuple[list[str], torch.Tensor]:
    """The texts of a set in their original order, and their labels; the arguments are those of `texts`."""
    one_of("data", name, _FILES)
    table = columns(_FILES[name][0 if train else 1], folder)
    parts = [table[column] for column in _TEXT_COLUMNS if column in table]
    rows = [" ".join(map(str, row)) for row in zip(*parts, strict=True)]
    return rows, torch.from_numpy(table["label"]).long()


def texts(
    name: str,
    train: bool,
    folder: str | os.PathLike[str] | None = None,
    *,
    length: int = LENGTH,
    buckets: int = BUCKETS,
) -> TensorDataset:
    """A set of texts in its original order.

    Args:
        name: "ag_news" (news in 4 classes; a sample of 10,000 to train on) or "imdb" (reviews in 2 classes).
        train: the training part or the test part.
        folder: of the data sets; by default that of the environment variable CLIPWISE_DATA.
        length: the number of words of a text that are kept.
        buckets: the number of ids.

    Returns:
        Ids, int64 [N, length] from 0 to buckets - 1, and labels, int64 [N].
    """
    rows, labels = raw_texts(name, train, folder)
    ids = [encode(row, length=length, buckets=buckets) for row in rows]
    return TensorDataset(torch.tensor(ids), labels)
