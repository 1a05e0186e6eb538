"""The IMDB sample as ids of fixed length, without a vocabulary.

A vocabulary made from the training texts would be a release of its own. Words are hashed into a fixed number of
buckets instead, by a public function: nothing here is learned from any text.
"""

from __future__ import annotations

import csv
import io
import lzma
import re
import zlib
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from clipwise.errors import ConfigurationError

LENGTH, BUCKETS, PADDING = 256, 2**14, 0


def encode(text: str) -> list[int]:
    """The buckets of the first words, filled up with padding; no word falls in the bucket of padding."""
    words = re.findall(r"[a-z']+", text.lower().replace("<br />", " "))[:LENGTH]
    ids = [1 + zlib.crc32(word.encode()) % (BUCKETS - 1) for word in words]
    return ids + [PADDING] * (LENGTH - len(ids))


def read(folder: Path, split: str, device: torch.device) -> TensorDataset:
    """`imdb_train.csv.xz` or `imdb_test.csv.xz`, with the columns `label` and `text`, as ids and labels."""
    file = folder / f"imdb_{split}.csv.xz"
    if not file.exists():
        raise ConfigurationError(f"--data holds no {file.name}: give the folder of the IMDB sample.")
    rows = list(csv.DictReader(io.StringIO(lzma.decompress(file.read_bytes()).decode(), newline="")))
    ids = torch.tensor([encode(row["text"]) for row in rows], device=device)
    return TensorDataset(ids, torch.tensor([int(row["label"]) for row in rows], device=device))
