"""The library dp-accounting, imported on first use, and its privacy loss distributions as an accountant.

It computes the same figure as pld.py with independent code, is slower, and does not support fixed-size batches.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from clipwise.accounting.composition import Composition
from clipwise.errors import UnsupportedEventError
from clipwise.privacy import Amplification

INTERVAL = 1e-4  # of the grid of privacy losses; the default of dp-accounting


@contextmanager
def without_warnings() -> Iterator[None]:
    """Drop the library's log messages in this block, which are harmless here."""
    logger = logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def epsilon(total: Composition, delta: float) -> float:
    """An upper bound on the smallest epsilon of a composition."""
    distribution = _distribution(total)
    return distribution if isinstance(distribution, float) else distribution.get_epsilon_for_delta(delta)


def delta(total: Composition, epsilon: float) -> float:
    """An upper bound on the smallest delta of a composition."""
    distribution = _distribution(total)
    if isinstance(distribution, float):
        return 0.0 if distribution == 0 else 1.0
    return float(distribution.get_delta_for_epsilon(epsilon))


def _distribution(total: Composition) -> Any:
    """The composed distribution, or epsilon (0 or infinity) if there is nothing to compose."""
    if math.isinf(total.mu):
        return math.inf
    found = [] if total.mu == 0 else [_of_step(1.0, 1 / total.mu)]
    for step, count in total.steps:
        if step.amplification is not Amplification.POISSON:
            raise UnsupportedEventError(
                "dp-accounting has no privacy loss distribution of fixed-size batches: use accountant='pld'."
            )
        found.append(_of_step(step.rate, step.z).self_compose(count))
    result: Any = found[0] if found else 0.0
    for other in found[1:]:
        result = result.compose(other)
    return result


@lru_cache(maxsize=32)
def _of_step(rate: float, z: float) -> Any:
    """One release. Under add/remove the library and clipwise define the noise multiplier in the same way."""
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=z, sampling_prob=rate, value_discretization_interval=INTERVAL
    )
