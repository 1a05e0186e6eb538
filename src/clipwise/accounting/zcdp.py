"""Zero-concentrated differential privacy: a single parameter, rho, that adds up.

A release that every unit takes part in, with z = noise / sensitivity, is rho-zCDP for rho = 1 / (2 z^2): its
Renyi divergence of every order alpha > 1 is at most rho alpha. Releases of one epoch on disjoint batches cost
as much as one of them. Amplified steps have no useful finite rho and are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from scipy import optimize

from clipwise.accounting.composition import Composition
from clipwise.errors import UnsupportedEventError

# Sums of a few terms, each with a relative error of 2^-53, are rounded up by this share of the sum of their sizes.
ROUNDING = 2.0**-49


def rho(total: Composition) -> float:
    """rho = sum_i 1 / (2 z_i^2), rounded up."""
    if total.steps:
        raise UnsupportedEventError(
            "accountant='zcdp' has no bound for steps that are amplified by sampling, and this run has some: use "
            "accountant='pld' or 'rdp', or sampling='full' or 'shuffled'."
        )
    return 0.5 * total.mu * total.mu * (1 + ROUNDING)


def epsilon(total: Composition, delta: float) -> float:
    """An upper bound on the smallest epsilon, by the tight conversion."""
    return tight_epsilon(rho(total), delta)


def delta(total: Composition, epsilon: float) -> float:
    """An upper bound on the smallest delta, by the tight conversion."""
    return tight_delta(rho(total), epsilon)


def tight_epsilon(rho: float, delta: float) -> float:
    """The best known conversion (Canonne, Kamath and Steinke, 2020), at the best order.

    Any order alpha > 1 gives a bound, so a search that misses the best one costs only tightness:

        epsilon = rho alpha + log(1 - 1/alpha) - (log delta + log alpha) / (alpha - 1).
    """
    if rho == 0 or math.isinf(rho):
        return rho

    def bound(log_excess: float) -> float:
        excess = math.exp(log_excess)  # alpha - 1
        log_order = math.log1p(excess)
        converted = [log_excess - log_order, -math.log(delta) / excess, -log_order / excess]
        return _rounded_up([rho, rho * excess, *converted])

    # Without the two small terms, which change little, the best alpha - 1 is sqrt(log(1/delta) / rho).
    centre = 0.5 * (math.log(-math.log(delta)) - math.log(rho))
    return max(0.0, _least(bound, centre))


def tight_delta(rho: float, epsilon: float) -> float:
    """The same conversion solved for delta, at the best order.

    delta = exp((alpha - 1) (rho alpha - epsilon)) (1 - 1/alpha)^alpha / (alpha - 1).
    """
    if rho == 0 or math.isinf(rho):
        return 0.0 if rho == 0 else 1.0

    def bound(log_excess: float) -> float:
        excess = math.exp(log_excess)
        gained = [excess * rho, excess * excess * rho, -excess * epsilon]
        return _rounded_up([*gained, excess * log_excess, -(1 + excess) * math.log1p(excess)])

    # Without terms that change little, the best alpha - 1 is the root x of 2 rho x^2 + (rho - epsilon) x = 1.
    root = math.hypot(epsilon - rho, math.sqrt(8 * rho))
    centre = math.log((epsilon - rho + root) / (4 * rho) if epsilon > rho else 2 / (rho - epsilon + root))
    return min(1.0, math.exp(min(0.0, _least(bound, centre))))


def _least(bound: Callable[[float], float], centre: float) -> float:
    """The least value of a function with one minimum that a search around `centre` finds."""
    centre = min(max(centre, -300.0), 300.0)
    found = optimize.minimize_scalar(bound, bounds=(centre - 6, centre + 6), method="bounded", options={"xatol": 1e-9})
    return min(float(found.fun), bound(centre))


def _rounded_up(terms: Sequence[float]) -> float:
    return math.fsum(terms) + ROUNDING * math.fsum(map(abs, terms))
