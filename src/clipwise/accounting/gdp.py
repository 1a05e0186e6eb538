"""Gaussian differential privacy, where it is exact: releases that every unit takes part in.

They compose to one Gaussian mechanism with mu = sqrt(sum_i (sensitivity_i / noise_i)^2), whose epsilon and
delta have closed forms. With amplified steps the composition is no Gaussian mechanism, and is refused.
"""

from __future__ import annotations

from clipwise.accounting import gaussian
from clipwise.accounting.composition import Composition
from clipwise.errors import UnsupportedEventError


def mu(total: Composition) -> float:
    """mu of the one Gaussian mechanism that a composition without amplified steps amounts to."""
    if total.steps:
        raise UnsupportedEventError(
            "accountant='gdp' is exact only without amplification by sampling (sampling='full' or 'shuffled'), "
            "and this run has amplified steps: use accountant='pld'. accounting.central_limit(...) gives the "
            "Gaussian approximation of such a run, which is no guarantee."
        )
    return total.mu


def epsilon(total: Composition, delta: float) -> float:
    """The smallest epsilon, from above."""
    return gaussian.epsilon(delta, mu(total))


def delta(total: Composition, epsilon: float) -> float:
    """The smallest delta."""
    return gaussian.delta(epsilon, mu(total))
