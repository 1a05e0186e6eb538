"""The cheap accountant: Renyi divergences add up, so a new step costs one multiplication.

For a live figure while training. It is an upper bound like the PLD accountant's, typically 8 to 25 percent
above it (more for fixed-size batches, whose Renyi bound is not tight).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from clipwise.accounting import library
from clipwise.accounting.composition import Amplification, Composition, Step, compose
from clipwise.accounting.gaussian import Array
from clipwise.errors import UnsupportedEventError
from clipwise.privacy import Entry

# The divergence of one amplified step is the logarithm of a sum near 1, good to about 1e-15. Rounding must not
# make many tiny steps cheaper than they are.
ROUNDING = 1e-15


def epsilon(history: Sequence[Entry], delta: float) -> float:
    """An upper bound on the smallest epsilon of a history."""
    return epsilon_of(compose(history), delta)


def delta(history: Sequence[Entry], epsilon: float) -> float:
    """An upper bound on the smallest delta of a history."""
    return delta_of(compose(history), epsilon)


def epsilon_of(composition: Composition, delta: float) -> float:
    """`epsilon` of a history that is already reduced."""
    if composition.mu == 0 and not composition.steps:
        return 0.0
    if math.isinf(composition.mu):
        return math.inf
    return float(_rdp().compute_epsilon(_orders(), _divergences(composition), delta)[0])


def delta_of(composition: Composition, epsilon: float) -> float:
    """`delta` of a history that is already reduced."""
    if composition.mu == 0 and not composition.steps:
        return 0.0
    if math.isinf(composition.mu):
        return 1.0
    return float(_rdp().compute_delta(_orders(), _divergences(composition), epsilon)[0])


def _rdp() -> Any:
    return library.load("dp_accounting.rdp.rdp_privacy_accountant")


@lru_cache(maxsize=1)
def _orders() -> Array:
    return np.asarray(_rdp().DEFAULT_RDP_ORDERS, dtype=np.float64)


def _divergences(composition: Composition) -> Array:
    """The Renyi divergence of the whole history at every order."""
    total = _orders() * (0.5 * composition.mu * composition.mu)
    for step, count in composition.steps:
        total = total + count * _divergences_of_step(step)
    return total


@lru_cache(maxsize=256)
def _divergences_of_step(step: Step) -> Array:
    """The Renyi divergence of one amplified step at every order.

    dp-accounting's RDP reads a noise multiplier as noise over the actual sensitivity under *either*
    relation, as `Step` does; its PLDs would double the sensitivity under REPLACE_ONE by themselves, and are
    never built that way here.
    """
    dp = library.load("dp_accounting")
    gaussian = dp.GaussianDpEvent(step.z)
    if step.amplification is Amplification.COIN:
        relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
        event = dp.PoissonSampledDpEvent(step.rate, gaussian)
    elif step.amplification is Amplification.DRAW:
        relation = dp.NeighboringRelation.REPLACE_ONE
        drawn, population = step.rate.as_integer_ratio()  # only the ratio matters, and this one is exact
        event = dp.SampledWithoutReplacementDpEvent(population, drawn, gaussian)
    else:
        raise UnsupportedEventError(f"The RDP accountant has no bound for {step.amplification}.")
    accountant = dp.rdp.RdpAccountant(_orders(), relation)
    with library.without_warnings():  # an order whose series does not converge gets inf, which is a bound
        accountant.compose(event)
    rounded_up: Array = np.maximum(accountant.rdp, 0.0) + ROUNDING
    return rounded_up
