"""The geometry of trade-off functions: every pair (epsilon, delta) is a line below the curve.

`refined` chooses the epsilons at which to compute delta(epsilon). Any choice gives a bound; this one gives a
tight bound from few points. `crossings` finds the corners of the maximum of the lines.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from clipwise.accounting.gaussian import Array

# A larger loss counts as infinite: e^300 can still be squared.
LARGEST = 300.0
SMALLEST = 1e-6
# A crossing that would rise by less than this, and by less than this share of the detection rate, is not refined.
ABSOLUTE = 1e-5
RELATIVE = 5e-4
ROUNDING = 1e-13
MOST_ROUNDS = 16
MOST_POINTS = 6000


def refined(profile: Callable[[Array], Array]) -> tuple[Array, Array]:
    """Epsilons in rising order and their deltas, from a function that bounds delta from above at every epsilon.

    The bound is worst at the crossing of two lines. Where a line in between would raise it noticeably, that line is
    added.
    """
    epsilons = np.concatenate([[0.0], np.geomspace(SMALLEST, LARGEST, 128)])
    deltas = profile(epsilons)
    low, high = epsilons[:-1], epsilons[1:]
    delta_low, delta_high = deltas[:-1], deltas[1:]
    for _ in range(MOST_ROUNDS):
        if not len(low) or len(epsilons) > MOST_POINTS:
            break
        middle = 0.5 * (low + high)
        delta_middle = profile(middle)
        # The lines of low and high cross at alpha; the line of middle is higher there by this much.
        alpha = np.maximum(delta_low - delta_high, 0.0) / (np.expm1(high) - np.expm1(low))
        lifted = delta_low - delta_middle - (np.expm1(middle) - np.expm1(low)) * alpha
        detected = delta_low + np.exp(low) * alpha
        useful = lifted > np.maximum(np.minimum(ABSOLUTE, RELATIVE * detected), ROUNDING)
        low, middle, high = low[useful], middle[useful], high[useful]
        delta_low, delta_middle, delta_high = delta_low[useful], delta_middle[useful], delta_high[useful]
        epsilons, deltas = np.concatenate([epsilons, middle]), np.concatenate([deltas, delta_middle])
        low, high = np.concatenate([low, middle]), np.concatenate([middle, high])
        delta_low, delta_high = (np.concatenate([delta_low, delta_middle]), np.concatenate([delta_middle, delta_high]))
    order = np.argsort(epsilons)
    return epsilons[order], deltas[order]


def lower_hull(x: Array, y: Array) -> tuple[Array, Array]:
    """The corners of the lower convex hull of points, from the smallest x to the largest.

    Points are processed by rising x. A corner that is not below the line from its predecessor to the next point
    is dropped, and so on backwards.
    """
    order = np.lexsort((y, x))
    corners: list[tuple[float, float]] = []
    for point in zip(x[order].tolist(), y[order].tolist(), strict=True):
        if corners and point[0] == corners[-1][0]:
            continue  # directly above the last one
        while len(corners) > 1 and not _turns_up(corners[-2], corners[-1], point):
            corners.pop()
        corners.append(point)
    found = np.array(corners, dtype=np.float64)
    return found[:, 0], found[:, 1]


def _turns_up(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Whether b lies below the line from a to c: compares the slopes of a-b and b-c."""
    return (b[1] - a[1]) * (c[0] - b[0]) < (c[1] - b[1]) * (b[0] - a[0])


def crossings(steepness: Array, deltas: Array) -> tuple[Array, Array]:
    """Where neighbours among the lines beta = 1 - delta - (1 + x) alpha cross, by falling x = e^epsilon - 1.

    Lines that are nowhere the highest are left out: they are the points (x, delta) above their own lower hull.
    """
    x, d = lower_hull(steepness, deltas)
    x, d = x[::-1], d[::-1]
    alphas = np.maximum.accumulate(np.maximum(np.diff(d) / -np.diff(x), 0.0))
    betas = 1 - d[1:] - (1 + x[1:]) * alphas  # on the flatter line of the two, with less cancellation
    return alphas, betas
