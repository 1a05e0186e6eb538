"""Gaussian differential privacy, for releases that every unit takes part in, where it is exact.

They compose to one Gaussian mechanism with mu = sqrt(sum_i (sensitivity_i / noise_i)^2). Amplified steps are refused.
"""

from __future__ import annotations

from clipwise.accounting import gaussian
from clipwise.accounting.composition import Composition
from clipwise.errors import UnsupportedEventError


def mu(total: Composition) -> float:
    """mu of the single Gaussian mechanism equivalent to a composition without amplified steps."""
    if total.steps:
        raise UnsupportedEventError(
            "accountant='gdp' is exact only without amplification by sampling (sampling='full' or 'shuffled'), "
            "and this run has amplified steps: use accountant='pld'. accounting.central_limit(...) gives the "
            "Gaussian approximation of such a run, which is no guarantee."
        )
    return total.mu


def epsilon(total: Composition, delta: float) -> float:
    """An upper bound on the smallest epsilon."""
    return gaussian.epsilon(delta, mu(total))


def delta(total: Composition, epsilon: float) -> float:
    """The smallest delta."""
    return gaussian.delta(epsilon, mu(total))
