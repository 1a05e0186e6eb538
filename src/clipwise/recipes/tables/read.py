"""Reads CSV and Parquet files as columns of text.

The encoding is that of the byte order mark, else UTF-8, or the one that is given. The delimiter is chosen from the
header line alone, which is public; no other line decides anything. Cells stay text here, so that nothing is inferred
from private rows: `values.py` reads numbers and dates.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import lzma
import math
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from clipwise.errors import ConfigurationError

DELIMITERS = (",", ";", "\t", "|")
PARQUET = (".parquet", ".pq")
# UTF-32 first: its mark begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# Compressed files, by their first bytes.
_COMPRESSED: tuple[tuple[bytes, Callable[[Path], Any]], ...] = (
    (b"\x1f\x8b", gzip.open),
    (b"BZh", bz2.open),
    (b"\xfd7zXZ\0", lzma.open),
)
_ARCHIVES = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")  # ZIP and .xlsx; .xls
LONGEST_NAME = 100
_CHUNK = 4096  # rows that are transposed at once
# A last row that is added to every file: an open double quote would make it part of another row.
_END = ["\x1fend of the file"]


@dataclass(frozen=True)
class Column:
    """One column: its distinct cells, and the index of the cell of every row."""

    cells: tuple[str, ...]
    codes_N: NDArray[np.int32]


@dataclass(frozen=True)
class Table:
    """A file as text.

    Attributes:
        columns: by name, in the order of the file.
        rows: the number of rows.
        format: "CSV" or "Parquet".
        decimal: the decimal mark of numbers: a comma in files with semicolons, as spreadsheets write them.
    """

    columns: dict[str, Column]
    rows: int
    format: str
    decimal: str = "."


def read_table(path: Path, encoding: str | None = None) -> Table:
    """Read a CSV file, which may be compressed (gzip, bzip2 or xz), or a Parquet file."""
    if not path.is_file():
        raise ConfigurationError(f"{path} is not a file: give a CSV or Parquet file.")
    if path.suffix.lower() in PARQUET:
        return _read_parquet(path)
    with _reading(path, encoding), _opened(path) as raw:
        text = io.TextIOWrapper(raw, encoding or _encoding_of(raw), newline="")
        return _read_csv(path, text)


def read_names(path: Path, encoding: str | None = None) -> tuple[str, ...]:
    """The names of the columns. Of a CSV file only the header line is read."""
    if not path.is_file():
        raise ConfigurationError(f"{path} is not a file: give a CSV or Parquet file.")
    if path.suffix.lower() in PARQUET:
        return _unique_names(list(_pyarrow(path, "parquet").read_schema(path).names), path)
    with _reading(path, encoding), _opened(path) as raw:
        # Rows are decoded along with the header and are not parsed: errors in them do not matter here.
        names = _header(path, io.TextIOWrapper(raw, encoding or _encoding_of(raw), "replace", newline=""))[0]
        if any("\N{REPLACEMENT CHARACTER}" in name for name in names):
            raise UnicodeError
        return names


def _opened(path: Path) -> Any:
    with path.open("rb") as raw:
        start = raw.read(6)
    if start.startswith(_ARCHIVES):
        raise ConfigurationError(
            f"{path} is a ZIP archive or a spreadsheet, not a CSV file: unpack it, or save the sheet as CSV in UTF-8."
        )
    return next((reads(path) for mark, reads in _COMPRESSED if start.startswith(mark)), None) or path.open("rb")


def _encoding_of(raw: BinaryIO) -> str:
    start = raw.read(4)
    raw.seek(0)
    return next((name for mark, name in _MARKS if start.startswith(mark)), "utf-8")


class _reading:  # noqa: N801 (a context manager)
    """Turns errors of the codec into ours. They show no bytes of the file."""

    def __init__(self, path: Path, encoding: str | None) -> None:
        self._path, self._encoding = path, encoding

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, UnicodeError):
            name = self._encoding or "UTF-8"
            raise ConfigurationError(
                f"{self._path} is not text in {name}: give --encoding, for instance --encoding cp1252 or "
                "--encoding latin-1 for files of older spreadsheets."
            ) from None
        if isinstance(error, LookupError) and not isinstance(error, (KeyError, IndexError)):
            raise ConfigurationError(
                f"--encoding {self._encoding} is not known: give a name such as utf-8, utf-16, cp1252 or latin-1."
            ) from None
        if isinstance(error, (OSError, EOFError, lzma.LZMAError, zlib.error)):
            raise ConfigurationError(f"{self._path} cannot be read: it is damaged, or access is denied.") from None


def _header(path: Path, text: io.TextIOWrapper) -> tuple[tuple[str, ...], Any, str]:
    """The names of the columns, a reader of the rows and of `_END`, and the delimiter."""
    line = text.readline()
    if not line.strip():
        raise ConfigurationError(f"{path} has no header: its first line must have the names of the columns.")
    if "\0" in line:
        raise ConfigurationError(f"{path} is not text in {text.encoding}: give --encoding, for instance utf-16.")
    outside = "".join(line.split('"')[::2])
    delimiter = max(DELIMITERS, key=outside.count)  # the first of them if there is none
    reader = csv.reader(chain([line], text, _END), delimiter=delimiter, skipinitialspace=True)
    try:
        names = next(reader)
    except csv.Error as error:
        raise ConfigurationError(f"{path}, line 1: the header cannot be read ({error}).") from None
    if reader.line_num > 1 + len(names):  # each name may have a line break; more of them may be rows, which are private
        raise ConfigurationError(f"{path}, line 1: the header cannot be read. A double quote may be missing.")
    if all(map(is_number, names)) and names != [str(place) for place in range(len(names))]:
        raise ConfigurationError(
            f"{path}: the first line has only numbers, so it seems to be a row. Add a line with the names of the "
            "columns."
        )
    return _unique_names(names, path), reader, delimiter


def _unique_names(names: list[str], path: Path) -> tuple[str, ...]:
    found = [name.strip() or f"column {number}" for number, name in enumerate(names, 1)]
    twice = sorted({name for name in found if found.count(name) > 1})
    if twice:
        raise ConfigurationError(
            f"{path} has {len(twice)} column name{'s' * (len(twice) > 1)} more than once: {', '.join(twice)}. Give "
            "each column its own name."
        )
    return tuple(found)


def listed(names: Iterable[str]) -> str:
    """The names of columns for an error; not if they seem to be a row, which is private."""
    found = list(names)
    if any(is_number(name) or len(name) > LONGEST_NAME for name in found):
        return "not listed here, because they look like a row. If the first line is one, add a line with names above it"
    return ", ".join(found)


def is_number(text: str) -> bool:
    """Whether a text is a number."""
    try:
        return not math.isnan(float(text))
    except ValueError:
        return False


def _read_csv(path: Path, text: io.TextIOWrapper) -> Table:
    names, reader, delimiter = _header(path, text)
    indices: list[dict[str, int]] = [{} for _ in names]
    codes = [array("i") for _ in names]
    rows: list[list[str]] = []
    total = 0
    for row in _rows(path, reader, len(names)):
        rows.append(row)
        if len(rows) == _CHUNK:
            total += _take(rows, indices, codes)
    total += _take(rows, indices, codes)
    if not total:
        raise ConfigurationError(f"{path} has a header but no rows.")
    columns = {
        name: Column(tuple(index), np.frombuffer(code, np.int32))
        for name, index, code in zip(names, indices, codes, strict=True)
    }
    return Table(columns, total, "CSV", "," if delimiter == ";" else ".")


def _rows(path: Path, reader: Any, fields: int) -> Iterator[list[str]]:
    """All rows; blank lines are skipped. Errors have the number of the line and nothing of its content."""
    row: list[str] = []
    try:
        for row in reader:
            if row == _END:
                break
            if len(row) == fields:
                yield row
            elif row:
                raise ConfigurationError(
                    f"{path}, line {reader.line_num}: the row does not have as many fields as the header. Correct the "
                    "line. A field with a delimiter or a line break must be in double quotes, and an open double quote "
                    "joins lines."
                )
    except csv.Error:
        raise ConfigurationError(
            f"{path}, line {reader.line_num}: the row cannot be read as CSV. A double quote may be missing."
        ) from None
    if row != _END:
        raise ConfigurationError(
            f"{path}: a double quote is open at the end of the file, so the lines after it are one field. Add the "
            "quote that is missing."
        )


def _take(rows: list[list[str]], indices: list[dict[str, int]], codes: list[array[int]]) -> int:
    """Append the rows to the columns, and forget them. Returns their number."""
    for column, index, code in zip(zip(*rows, strict=True), indices, codes, strict=False):
        code.extend([index.setdefault(cell, len(index)) for cell in column])
    taken = len(rows)
    rows.clear()
    return taken


def _pyarrow(path: Path, module: str) -> Any:
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigurationError(
            f"{path} is a Parquet file: run `pip install clipwise-dp[tables]` to read it, or convert it to CSV."
        ) from error
    return pyarrow if module == "pyarrow" else getattr(pyarrow, module)


def _read_parquet(path: Path) -> Table:
    pa, parquet, compute = (_pyarrow(path, name) for name in ("pyarrow", "parquet", "compute"))
    try:
        table = parquet.read_table(path)
    except (OSError, pa.ArrowException):
        raise ConfigurationError(f"{path} cannot be read as Parquet: it is damaged or of another format.") from None
    names = _unique_names(list(table.column_names), path)
    if not table.num_rows:
        raise ConfigurationError(f"{path} has no rows.")
    columns = {}
    for name, column in zip(names, table.columns, strict=True):
        try:
            text = compute.fill_null(compute.cast(column.combine_chunks(), pa.string()), "")
        except pa.ArrowException:
            raise ConfigurationError(
                f"{path}: the column {name!r} is of type {column.type}, which is not a number, text or a date. Leave "
                "it out of the file."
            ) from None
        if isinstance(text, pa.ChunkedArray):
            text = text.combine_chunks()
        coded = text.dictionary_encode()
        codes_N = np.asarray(coded.indices.to_numpy(zero_copy_only=False), np.int32)
        columns[name] = Column(tuple(coded.dictionary.to_pylist()), codes_N)
    return Table(columns, table.num_rows, "Parquet")
