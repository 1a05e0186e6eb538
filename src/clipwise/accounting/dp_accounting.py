"""The library dp-accounting, loaded when a figure needs it, and its privacy loss distributions as an accountant.

The accountant computes what pld.py computes, by other people's code: a second opinion. It is slower, and has no
fixed-size batches. Training and the PLD accountant work without the library.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from clipwise.accounting.composition import Composition
from clipwise.errors import UnsupportedEventError
from clipwise.privacy import Amplification

INTERVAL = 1e-4  # of the grid of privacy losses; dp-accounting's own default


def load(module: str) -> Any:
    """A module of dp-accounting by its dotted name, or an error that names the package to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            "This accountant needs the package dp-accounting, which is not installed: run "
            "`pip install dp-accounting`."
        ) from error


@contextmanager
def without_warnings() -> Iterator[None]:
    """Drop the library's log messages in this block, where they are known to be harmless."""
    logger = logging.getLogger("absl")

    def drop(record: logging.LogRecord) -> bool:
        return False

    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)


def epsilon(total: Composition, delta: float) -> float:
    """The smallest epsilon of a composition, from above."""
    distribution = _distribution(total)
    return distribution if isinstance(distribution, float) else distribution.get_epsilon_for_delta(delta)


def delta(total: Composition, epsilon: float) -> float:
    """The smallest delta of a composition, from above."""
    distribution = _distribution(total)
    if isinstance(distribution, float):
        return 0.0 if distribution == 0 else 1.0
    return float(distribution.get_delta_for_epsilon(epsilon))


def _distribution(total: Composition) -> Any:
    """The composed distribution, or epsilon itself where there is nothing to compose: 0 or infinity."""
    if math.isinf(total.mu):
        return math.inf
    found = [] if total.mu == 0 else [_of_step(1.0, 1 / total.mu)]
    for step, count in total.steps:
        if step.amplification is not Amplification.COIN:
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
    """One release. Under add/remove both read a noise multiplier as noise over the record's own bound."""
    distributions = load("dp_accounting.pld.privacy_loss_distribution")
    return distributions.from_gaussian_mechanism(
        standard_deviation=z, sampling_prob=rate, value_discretization_interval=INTERVAL
    )
