"""The cheap accountant: Renyi divergences add up, so a new step costs one multiplication.

It gives a live figure during training. It is an upper bound, typically 8 to 25 percent above the PLD accountant
(more for fixed-size batches, for which the Renyi bound is not tight).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from clipwise.accounting.composition import Composition, Step, with_few_kinds
from clipwise.accounting.dp_accounting import without_warnings
from clipwise.accounting.gaussian import Array
from clipwise.errors import UnsupportedEventError
from clipwise.privacy import Amplification

# Any order gives a bound; these are dense where the best one usually lies.
ORDERS: Array = np.array([1 + x / 10 for x in range(1, 100)] + list(range(11, 64)) + [128, 256, 512, 1024])
# The divergence of one amplified step is the logarithm of a sum near 1, with an error of about 1e-15. Rounding must not
# make many tiny steps cheaper than they are.
ROUNDING = 1e-15
# The conversions below are sums of few terms, so this share of their sizes exceeds their rounding error.
SLACK = 2.0**-49
# Divergences are computed for this many different steps, at about 30 ms each; of more, several share one.
MOST_KINDS = 256


def epsilon(total: Composition, delta: float) -> float:
    """An upper bound on the smallest epsilon of a composition."""
    if total.is_empty:
        return 0.0
    return epsilon_from(divergences(total), delta)


def delta(total: Composition, epsilon: float) -> float:
    """An upper bound on the smallest delta of a composition: the conversion of `epsilon_from`, solved for delta."""
    if total.is_empty:
        return 0.0
    found = divergences(total)
    gains = (ORDERS - 1) * (found - epsilon)
    terms = gains + (ORDERS - 1) * np.log(ORDERS - 1) - ORDERS * np.log(ORDERS)
    sizes = (ORDERS - 1) * (found + epsilon + np.log(ORDERS)) + 1
    exponent = float(np.where(np.isinf(found), np.inf, terms + SLACK * sizes).min())
    total_variation = math.sqrt(-math.expm1(-float(found.min()))) * (1 + SLACK)
    return min(1.0, total_variation, math.exp(min(exponent, 0.0)))


def epsilon_from(divergences: Array, delta: float) -> float:
    """Epsilon of a mechanism from its divergence D at every order alpha (Canonne, Kamath and Steinke, 2020).

        epsilon = D + log(1 - 1/alpha) - log(delta alpha) / (alpha - 1)

    Epsilon is 0 if delta bounds the total variation, which is at most sqrt(1 - e^-D) for any order.
    """
    if delta * delta * (1 - SLACK) >= -math.expm1(-float(divergences.min())):
        return 0.0
    return max(0.0, float((divergences * (1 + SLACK) + conversion(delta)).min()))


@lru_cache(maxsize=16)
def conversion(delta: float) -> Array:
    """The term added to the divergence at every order to get epsilon at delta, rounded up."""
    terms = np.log1p(-1 / ORDERS) - (math.log(delta) + np.log(ORDERS)) / (ORDERS - 1)
    rounded_up: Array = terms + SLACK * (1 + np.abs(terms))
    rounded_up.setflags(write=False)
    return rounded_up


def divergences(total: Composition) -> Array:
    """Upper bounds on the Renyi divergence of a composition at each of ORDERS."""
    found: Array = ORDERS * (0.5 * total.mu * total.mu)
    steps = with_few_kinds(total, MOST_KINDS).steps
    for step, count in steps:
        found = found + count * of_step(step)
    return found * (1 + (len(steps) + 4) * 2.0**-52)  # one rounding for each addition, and a few more


@lru_cache(maxsize=2 * MOST_KINDS)
def of_step(step: Step) -> Array:
    """The Renyi divergence of one amplified step at each of ORDERS.

    dp-accounting's RDP defines a noise multiplier as noise over the actual sensitivity under *either* relation, as
    `Step` does. Its PLDs would double the sensitivity under REPLACE_ONE, and are never built that way here.
    """
    import dp_accounting as dp
    from dp_accounting import rdp

    gaussian = dp.GaussianDpEvent(step.z)
    if step.amplification is Amplification.POISSON:
        relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
        event = dp.PoissonSampledDpEvent(step.rate, gaussian)
    elif step.amplification is Amplification.WITHOUT_REPLACEMENT:
        relation = dp.NeighboringRelation.REPLACE_ONE
        drawn, population = step.rate.as_integer_ratio()  # only the ratio matters, and this one is exact
        event = dp.SampledWithoutReplacementDpEvent(population, drawn, gaussian)
    else:
        raise UnsupportedEventError(f"The RDP accountant has no bound for {step.amplification}.")
    accountant = rdp.RdpAccountant(ORDERS, relation)
    with without_warnings():  # an order for which the series does not converge gets inf, which is a bound
        accountant.compose(event)
    rounded_up: Array = np.maximum(accountant.rdp, 0.0) + ROUNDING
    rounded_up.setflags(write=False)  # because it is cached
    return rounded_up
