"""What noised counts show about a column: its kind, its quantiles and its frequent values.

Each undeclared column has one histogram over a fixed public list of bins: missing; numbers on a signed logarithmic
grid; dates by year; all other text by a public hash. A row is in exactly one bin of each column. What follows from the
noised counts is post-processing.

Noise makes empty bins look occupied. With s the standard deviation of the noise and B bins, a bin counts as occupied
above t s, t = sqrt(2 log B) + 1/2, which noise alone rarely reaches in any bin; beside an occupied bin 3/2 s is enough.
If no bin is occupied, wider windows of 2, 4, 8, ... bins are searched in the same way. Noise alone passes one of these
thresholds for about one column in twenty, which costs a feature little. The range of a target decides what is trained:
it needs t + 2, which noise alone passes in about one run of 100,000 (a union bound over all windows).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from clipwise.recipes.tables.schema import Date, Hashed, Ignored, Kind, Mixed, Number
from clipwise.recipes.tables.values import bucket, days, is_missing, numbers, to_day

SMALLEST, LARGEST = -6, 12  # the grid covers 10^-6 to 10^12 on both sides of 0
FIRST_YEAR, LAST_YEAR = 1900, 2100
QUANTILES = 12  # steps of equal probability
TAIL = 0.005  # of the rows, beyond the outer quantiles on each side
# For columns whose counts show nothing: powers of ten.
DEFAULT_POINTS = (*(-(10.0**k) for k in range(6, -3, -1)), 0.0, *(10.0**k for k in range(-2, 7)))
DEFAULT_BUCKETS = 16
# With more of the buckets of text occupied than this, there are more values than buckets.
CROWDED = 0.75
TARGET_MARGIN = 2.0  # standard deviations, added to the threshold for the range of a target

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Bins:
    """The bins of a column: [missing | numbers | years | buckets of text].

    Args:
        per_decade: bins per power of ten.
        buckets: of text.
    """

    per_decade: int
    buckets: int

    @classmethod
    def suitable(cls, rows: int, std: float) -> Bins:
        """Fine bins if there are many rows for the noise, else coarse ones. It depends on public numbers alone."""
        return cls(8, 256) if rows > 200 * std else cls(2, 32)

    @property
    def edges(self) -> Floats:
        """The edges of the bins of numbers; the outermost bins also take what is beyond."""
        return _edges(self.per_decade)

    @property
    def years(self) -> int:
        """The number of bins of dates."""
        return LAST_YEAR - FIRST_YEAR

    @property
    def starts(self) -> tuple[int, int, int]:
        """The first bins of numbers, years and buckets."""
        numbers_end = 1 + len(self.edges) - 1
        return 1, numbers_end, numbers_end + self.years

    @property
    def count(self) -> int:
        """The number of bins."""
        return self.starts[2] + self.buckets

    def of(self, cells: Sequence[str], missing: Sequence[str], decimal: str) -> NDArray[np.int64]:
        """The bin of each cell."""
        first_number, first_year, first_bucket = self.starts
        value, day = numbers(cells, decimal), days(cells)
        absent, is_number, is_date = is_missing(cells, missing), ~np.isnan(value), ~np.isnan(day)
        found = np.zeros(len(cells), np.int64)
        grid = np.searchsorted(self.edges, np.nan_to_num(value, posinf=np.inf, neginf=-np.inf), side="right") - 1
        found = np.where(is_number, first_number + np.clip(grid, 0, len(self.edges) - 2), found)
        year = np.nan_to_num(day) / 365.2425 + 1970 - FIRST_YEAR
        year_bin = np.clip(np.floor(year), 0, self.years - 1).astype(np.int64)
        found = np.where(is_date & ~is_number, first_year + year_bin, found)
        for place in np.flatnonzero(~absent & ~is_number & ~is_date).tolist():
            found[place] = first_bucket + bucket(cells[place], self.buckets)
        return np.where(absent, 0, found)


@lru_cache(maxsize=4)
def _edges(per_decade: int) -> Floats:
    above = 10.0 ** (np.arange((LARGEST - SMALLEST) * per_decade + 1) / per_decade + SMALLEST)
    return np.concatenate([-above[::-1], above])


def kind_of(noised_K: NDArray[np.int64], std: float, bins: Bins) -> tuple[Kind, str]:
    """The kind that noised counts suggest, and a remark about it for the statement."""
    first_number, first_year, first_bucket = bins.starts
    parts = {
        "number": noised_K[first_number:first_year],
        "date": noised_K[first_year:first_bucket],
        "text": noised_K[first_bucket:],
    }
    cleaned = {name: occupied(part, std) for name, part in parts.items()}
    best = max(cleaned, key=lambda name: float(cleaned[name].sum()))
    count_K = cleaned[best]
    if not count_K.any():
        return Mixed(DEFAULT_POINTS, DEFAULT_BUCKETS), "mixed, with public default ranges: the noise hides its values"
    if best == "number":
        points = quantiles(count_K, bins.edges)
        return Number(points), f"a number, with quantiles from {shown(points[0])} to {shown(points[-1])}"
    if best == "date":
        years = np.flatnonzero(count_K) + FIRST_YEAR
        low, high = date(int(years[0]), 1, 1), date(int(years[-1]) + 1, 1, 1)
        return Date(to_day(low), to_day(high)), f"a date, from {low.year} to {high.year - 1}"
    least = _least(len(count_K)) * std
    sure = np.flatnonzero(parts["text"] > least)
    if len(sure) > CROWDED * bins.buckets:
        # Every bucket holds many rare values, as of ids: only a bucket with a frequent value has a larger count.
        sure = np.flatnonzero(parts["text"] > 2 * np.median(parts["text"]) + least)
    if not len(sure):
        return Ignored(), "ignored: text without frequent values"
    return Hashed(bins.buckets, tuple(sure.tolist())), f"text, {len(sure)} frequent of {bins.buckets} hashed values"


def occupied(noised_K: NDArray[np.int64], std: float, margin: float = 0.0) -> Floats:
    """The counts without those that may be noise alone, which become 0. `margin` is added to the threshold t."""
    count_K = noised_K.astype(np.float64)
    least = (_least(len(count_K)) + margin) * std
    width = 1
    while width <= len(count_K):
        sums = np.convolve(count_K, np.ones(width), "valid")
        if sums.max() > least * math.sqrt(width):
            break
        width *= 2
    else:
        return np.zeros(len(count_K))
    if width > 1:  # one window is known to be occupied, and nothing about its parts
        start = int(sums.argmax())
        kept = np.zeros(len(count_K), bool)
        kept[start : start + width] = True
        return np.where(kept, float(sums.max()) / width, 0.0)
    kept = count_K > least
    for _ in range(len(count_K)):
        beside = np.zeros_like(kept)
        beside[1:] |= kept[:-1]
        beside[:-1] |= kept[1:]
        grown = kept | (beside & (count_K > 1.5 * std))
        if (grown == kept).all():
            break
        kept = grown
    return np.where(kept, np.maximum(count_K, 0.0), 0.0)


def shown(value: float) -> str:
    """A number with four digits for readers: 26,000 rather than 2.6e+04."""
    return f"{float(f'{value:.4g}'):,.10g}" if abs(value) < 1e9 else f"{value:.4g}"


def _least(bins: int) -> float:
    return math.sqrt(2 * math.log(max(bins, 2))) + 0.5


def quantiles(count_K: Floats, edges: Floats) -> tuple[float, ...]:
    """Points of rising probability, in equal steps, of a histogram with even bins.

    The bin around 0 counts as the value 0. A point that repeats is a value of many rows.
    """
    share = np.concatenate([[0.0], np.cumsum(count_K)]) / count_K.sum()
    wanted = np.linspace(TAIL, 1 - TAIL, QUANTILES + 1)
    place = np.clip(np.searchsorted(share, wanted, side="right") - 1, 0, len(count_K) - 1)
    inside = (wanted - share[place]) / np.maximum(share[place + 1] - share[place], 1e-12)
    low, high = edges[place], edges[place + 1]
    found = np.where(low == -high, 0.0, low + np.clip(inside, 0, 1) * (high - low))
    return tuple(float(f"{x:.6g}") for x in found)


def range_of(noised_K: NDArray[np.int64], std: float, bins: Bins) -> tuple[tuple[float, float] | None, int]:
    """The range of a target of numbers, the outer edges of the occupied bins, or None; and how many are occupied."""
    first_number, first_year, _ = bins.starts
    used = np.flatnonzero(occupied(noised_K[first_number:first_year], std, TARGET_MARGIN))
    if not len(used):
        return None, 0
    low, high = bins.edges[used[0]], bins.edges[used[-1] + 1]
    middle = len(bins.edges) // 2 - 1  # the bin around 0
    low = 0.0 if used[0] == middle and used[-1] > middle else low
    high = 0.0 if used[-1] == middle and used[0] < middle else high
    return (float(f"{low:.6g}"), float(f"{high:.6g}")), len(used)
