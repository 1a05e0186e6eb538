"""How the cells of a column become inputs of a model. Each cell is encoded by fixed numbers, without other rows.

| kind | inputs |
|---|---|
| number | its place between the points, from -1 to 1; whether it is missing |
| category | one for each value; one for all others; whether it is missing |
| hashed | one for each kept bucket; one for all others; whether it is missing |
| date | its place between the bounds; the season and the weekday as sine and cosine; whether it is missing |
| mixed | as a number and as hashed text |

A missing value has 1 in its own input and 0 elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from clipwise.recipes.tables.schema import Auto, Category, Date, Hashed, Ignored, Kind, Mixed, Number
from clipwise.recipes.tables.values import bucket, days, is_missing, numbers

Floats = NDArray[np.float32]

_DAYS_OF_YEAR = 365.2425


def width(kind: Kind) -> int:
    """The number of inputs of a column."""
    match kind:
        case Number():
            return 2
        case Category():
            return len(kind.values) + 2
        case Hashed():
            return len(kind.kept) + 2
        case Date():
            return 6
        case Mixed():
            return 1 + kind.buckets + 1
        case Ignored() | Auto():
            return 0


def encoded(kind: Kind, cells: Sequence[str], missing: Sequence[str], decimal: str) -> Floats:
    """The inputs of each cell, [cells, width(kind)]."""
    found = np.zeros((len(cells), width(kind)), np.float32)
    absent = is_missing(cells, missing)
    match kind:
        case Number():
            value = numbers(cells, decimal)
            absent = absent | np.isnan(value)
            found[:, 0] = np.where(absent, 0.0, placed(value, kind.points))
        case Category():
            index = {text: place for place, text in enumerate(kind.values)}
            places = [index.get(cell.strip(), len(index)) for cell in cells]
            found[np.arange(len(cells)), places] = 1.0
            absent = absent & (np.array(places, int) == len(index))  # "NA" may be a declared value
            found[absent] = 0.0
        case Hashed():
            place_of = {each: place for place, each in enumerate(kind.kept)}
            places = [place_of.get(bucket(cell, kind.buckets), len(place_of)) for cell in cells]
            found[np.arange(len(cells)), places] = 1.0
            found[absent] = 0.0
        case Date():
            day = days(cells)
            absent = absent | np.isnan(day)
            day = np.where(absent, 0.0, day)
            found[:, 0] = placed(day, (kind.low, kind.high))
            for column, period in ((1, _DAYS_OF_YEAR), (3, 7.0)):
                angle = 2 * np.pi * day / period
                found[:, column], found[:, column + 1] = np.sin(angle), np.cos(angle)
            found[absent] = 0.0
        case Mixed():
            value = numbers(cells, decimal)
            is_text = np.isnan(value) & ~absent
            found[:, 0] = np.where(np.isnan(value), 0.0, placed(value, kind.points))
            for row in np.flatnonzero(is_text).tolist():
                found[row, 1 + bucket(cells[row], kind.buckets)] = 1.0
    if found.shape[1]:
        found[absent, -1] = 1.0
    return found


def placed(values: NDArray[np.float64], points: Sequence[float]) -> NDArray[np.float64]:
    """Values interpolated linearly between the points, which map to equal steps from -1 to 1; clipped to this range.

    A point that repeats, a value of many rows, gets the mean of its places.
    """
    distinct, index = np.unique(np.asarray(points, np.float64), return_inverse=True)
    place = np.bincount(index, np.linspace(-1, 1, len(points))) / np.bincount(index)
    return np.interp(np.nan_to_num(values, posinf=np.inf, neginf=-np.inf), distinct, place)
