"""Tables from compressed csv files, by column."""

from __future__ import annotations

import csv
import gzip
import io
import lzma
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipwise.errors import ConfigurationError
from experiments.data.folder import folder_of


def columns(name: str, folder: str | os.PathLike[str] | None = None) -> dict[str, NDArray[Any]]:
    """The columns of a table by their names: numbers as float64, all else as text.

    Nothing is scaled or encoded. Levels of a text column and ranges of numbers that are computed from the table are
    functions of private records: a private experiment fixes them beforehand.

    Args:
        name: of the file without its end, such as "adult_train" for `adult_train.csv.gz` or `.csv.xz`.
        folder: of the data sets; by default that of the environment variable CLIPWISE_DATA.
    """
    place = folder_of(folder)
    for end, decompress in ((".csv.gz", gzip.decompress), (".csv.xz", lzma.decompress)):
        file = place / f"{name}{end}"
        if file.is_file():
            text = decompress(file.read_bytes()).decode("utf-8")
            head, *rows = csv.reader(io.StringIO(text, newline=""))
            return {column: _typed(values) for column, values in zip(head, zip(*rows, strict=True), strict=True)}
    raise ConfigurationError(f"The folder of data sets holds no {name}.csv.gz and no {name}.csv.xz.")


def _typed(values: tuple[str, ...]) -> NDArray[Any]:
    try:
        return np.array(values, dtype=np.float64)
    except ValueError:
        return np.array(values)
