"""Reads cells as numbers and dates, and hashes text, by fixed public rules that read one cell alone."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import date, datetime
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

# Compared without case and without surrounding blanks.
MISSING = ("", "na", "n/a", "nan", "?", "null")
_ISO = re.compile(r"(\d{4})[-/](\d{1,2})[-/](\d{1,2})(?:[T ](\d{1,2}):(\d{2})(?::(\d{2}))?\S*)?")
_DOTS = re.compile(r"(\d{1,2})\.(\d{1,2})\.(\d{4})")
_SLASHES = re.compile(r"(\d{1,2})/(\d{1,2})/(\d{4})")
_EPOCH = date(1970, 1, 1).toordinal()

Floats = NDArray[np.float64]


def is_missing(cells: Sequence[str], missing: Sequence[str] = MISSING) -> NDArray[np.bool_]:
    """Whether each cell stands for a missing value."""
    words = {word.strip().lower() for word in missing}
    return np.array([cell.strip().lower() in words for cell in cells], bool)


def numbers(cells: Sequence[str], decimal: str = ".") -> Floats:
    """Each cell as a number; nan if it is none."""
    return np.array([_number(cell, decimal) for cell in cells], np.float64)


def days(cells: Sequence[str]) -> Floats:
    """Each cell as days since 1970, with a fraction for the time of day; nan if it is no date.

    Known are 2026-11-18 and 2026/11/18, also with a time of day, 18.11.2026, and 11/18/2026. Of the last, the first
    number is the month unless it is above 12.
    """
    return np.array([_day(cell) for cell in cells], np.float64)


def bucket(text: str, buckets: int) -> int:
    """A public hash of a text, the same everywhere."""
    digest = blake2b(text.strip().encode("utf-8", "surrogatepass"), digest_size=8, person=b"clipwise.bucket").digest()
    return int.from_bytes(digest, "big") % buckets


def _number(cell: str, decimal: str) -> float:
    if decimal == "," and "," in cell and "." not in cell:
        cell = cell.replace(",", ".")
    if "_" in cell:  # Python's own notation
        return math.nan
    try:
        return float(cell)
    except ValueError:
        return math.nan


def _day(cell: str) -> float:
    cell = cell.strip()
    time = 0.0
    if found := _ISO.fullmatch(cell):
        year, month, day = (int(part) for part in found.groups()[:3])
        hour, minute, second = (int(part or 0) for part in found.groups()[3:])
        time = (hour + (minute + second / 60) / 60) / 24
    elif found := _DOTS.fullmatch(cell):
        day, month, year = (int(part) for part in found.groups())
    elif found := _SLASHES.fullmatch(cell):
        month, day, year = (int(part) for part in found.groups())
        if month > 12:
            month, day = day, month
    else:
        return math.nan
    try:
        return date(year, month, day).toordinal() - _EPOCH + time
    except ValueError:
        return math.nan


def to_day(value: date | datetime) -> float:
    """A date as days since 1970."""
    return float(value.toordinal() - _EPOCH)


def to_date(day: float) -> date:
    """The date of a number of days since 1970."""
    return date.fromordinal(min(max(math.floor(day) + _EPOCH, 1), date.max.toordinal()))
