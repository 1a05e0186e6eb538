"""The one piece of geometry behind trade-off functions: what lies lowest among points, or above lines."""

from __future__ import annotations

import numpy as np

from clipwise.accounting.gaussian import Array


def lower_hull(x: Array, y: Array) -> tuple[Array, Array]:
    """The corners of the lower convex hull of points, from the smallest x to the largest.

    Points are taken by rising x. A corner that is not below the line from the one before it to the next point
    is dropped, and so on backwards.
    """
    order = np.lexsort((y, x))
    corners: list[tuple[float, float]] = []
    for point in zip(x[order].tolist(), y[order].tolist(), strict=True):
        if corners and point[0] == corners[-1][0]:
            continue  # straight above the last one
        while len(corners) > 1 and not _turns_up(corners[-2], corners[-1], point):
            corners.pop()
        corners.append(point)
    found = np.array(corners, dtype=np.float64)
    return found[:, 0], found[:, 1]


def _turns_up(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Is b below the line from a to c? Compares the slopes of a-b and b-c."""
    return (b[1] - a[1]) * (c[0] - b[0]) < (c[1] - b[1]) * (b[0] - a[0])


def crossings(steepness: Array, deltas: Array) -> tuple[Array, Array]:
    """Where neighbours among the lines beta = 1 - delta - (1 + x) alpha cross, by falling x = e^epsilon - 1.

    Lines that are nowhere the highest are left out: those are the points (x, delta) above their own lower hull.
    """
    x, d = lower_hull(steepness, deltas)
    x, d = x[::-1], d[::-1]
    alphas = np.maximum.accumulate(np.maximum(np.diff(d) / -np.diff(x), 0.0))
    betas = 1 - d[1:] - (1 + x[1:]) * alphas  # on the flatter line of the two, where less is cancelled
    return alphas, betas
