"""From a curve delta(epsilon) to a pair on a grid that dominates it: connect the dots.

The pair's own curve passes through the deltas given and is linear in e^epsilon between them. A true curve is
convex in e^epsilon, so it lies below (Doroshenko et al., "Connect the Dots", 2022). That holds for any grid, so a
coarse one costs tightness and never validity.
"""

from __future__ import annotations

import math

import numpy as np

from clipwise.accounting.gaussian import Array
from clipwise.accounting.losses import Losses, grid
from clipwise.accounting.spectrum import UNIT_ROUNDOFF


def connect_dots(deltas: Array, interval: float) -> tuple[Array, float]:
    """Masses of the pair whose curve passes through `deltas` and is linear in e^epsilon between, rounded up.

    With drops g_i = delta_i - delta_{i+1} the mass at point i is (e^h g_{i-1} - g_i) / (e^h - 1). The first point
    has none before it and gets no mass; above the last the curve stays at its delta, which is the lost mass.

    Returns:
        The masses of all points but the first, and how much rounding up has added to them.
    """
    drops = -np.diff(
        np.minimum.accumulate(deltas)
    )  # a delta that rounding lifted over the one before comes down
    after = np.append(drops[1:], 0.0)
    raised = math.exp(interval) * drops
    exact = (raised - after) / math.expm1(interval)
    # Six roundings of u each: of the drops, the product, the difference, the quotient, and of e^h twice.
    masses = np.maximum(exact, 0.0) + 8 * UNIT_ROUNDOFF * (raised + after) / math.expm1(interval)
    return masses, float((masses - exact).sum())


def both_orders(deltas: Array, deltas_back: Array, interval: float) -> tuple[Losses, Losses]:
    """The pairs (P, Q) and (Q, P), from their curves at 0, h, 2h, ..., which may be of different length.

    A mass m at loss l of the one is a mass m e^-l at loss -l of the other. What is left lies at loss 0. Both
    curves begin with the total variation distance. The mass at 0 makes up for what the rest was rounded up by:
    below epsilon = 0 a curve is what P has in all, less e^epsilon times what Q has, plus e^epsilon times the
    other curve, and one of the first two may have been raised by more than the other.
    """
    deltas_back = np.append(deltas[:1], deltas_back[1:])
    masses, added = connect_dots(deltas, interval)
    back, added_back = connect_dots(deltas_back, interval)
    first, last = -len(back), len(masses)
    mirrored = (masses * np.exp(-grid(1, last, interval)))[::-1] * (1 + 8 * UNIT_ROUNDOFF)
    back_mirrored = (back * np.exp(-grid(1, -first, interval)))[::-1] * (1 + 8 * UNIT_ROUNDOFF)
    lost, lost_back = float(deltas[-1]), float(deltas_back[-1])
    at_zero = max(0.0, 1 - lost - float(masses.sum() + back_mirrored.sum()))
    at_zero += 2 * (added + added_back) + 128 * UNIT_ROUNDOFF
    return (
        Losses(interval, first, np.concatenate([back_mirrored, [at_zero], masses]), lost),
        Losses(interval, -last, np.concatenate([mirrored, [at_zero], back]), lost_back),
    )
