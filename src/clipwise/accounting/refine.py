"""Choosing the epsilons at which a curve delta(epsilon) is worth knowing.

Every pair (epsilon, delta) is a line below the trade-off function, so any choice gives a bound; this one gives
a tight bound from few points. Between two lines their crossing is the worst place. Where a line in between
would lift it noticeably, that line is taken in.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from clipwise.accounting.gaussian import Array

Profile = Callable[[Array], Array]  # delta at every epsilon, from above

# No loss beyond this is told from an infinite one: e^300 can still be squared.
LARGEST = 300.0
SMALLEST = 1e-6
# Below minus this, e^epsilon - 1 has too few digits left, and lines are too flat to matter.
MOST_NEGATIVE = 25.0
# A crossing that is lifted by less than this, and by less than that part of the detection rate, is let be.
ABSOLUTE = 1e-5
RELATIVE = 5e-4
ROUNDING = 1e-13
MOST_ROUNDS = 16
MOST_POINTS = 6000


def refined(profile: Profile, *, both_signs: bool = False) -> tuple[Array, Array]:
    """Epsilons in rising order, and their deltas; negative epsilons too if `both_signs`."""
    positive = np.concatenate([[0.0], np.geomspace(SMALLEST, LARGEST, 128)])
    negative = -np.geomspace(MOST_NEGATIVE, SMALLEST, 128)
    epsilons = np.concatenate([negative, positive]) if both_signs else positive
    deltas = profile(epsilons)
    low, high = epsilons[:-1], epsilons[1:]
    delta_low, delta_high = deltas[:-1], deltas[1:]
    for _ in range(MOST_ROUNDS):
        if not len(low) or len(epsilons) > MOST_POINTS:
            break
        middle = 0.5 * (low + high)
        delta_middle = profile(middle)
        # The lines of low and high cross at alpha; there the one of middle is higher by this much.
        alpha = np.maximum(delta_low - delta_high, 0.0) / (np.expm1(high) - np.expm1(low))
        lifted = delta_low - delta_middle - (np.expm1(middle) - np.expm1(low)) * alpha
        detected = delta_low + np.exp(low) * alpha
        useful = lifted > np.maximum(np.minimum(ABSOLUTE, RELATIVE * detected), ROUNDING)
        low, middle, high = low[useful], middle[useful], high[useful]
        delta_low, delta_middle, delta_high = delta_low[useful], delta_middle[useful], delta_high[useful]
        epsilons, deltas = np.concatenate([epsilons, middle]), np.concatenate([deltas, delta_middle])
        low, high = np.concatenate([low, middle]), np.concatenate([middle, high])
        delta_low, delta_high = (
            np.concatenate([delta_low, delta_middle]),
            np.concatenate([delta_middle, delta_high]),
        )
    order = np.argsort(epsilons)
    return epsilons[order], deltas[order]
