"""Converts the arguments of `accounting.epsilon` and related functions to events. Errors name the argument."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from clipwise.accounting import truncation
from clipwise.errors import ConfigurationError
from clipwise.privacy import SUPPORTED, Adjacency, Entry, Event, Sampling, Unit
from clipwise.validation.arguments import number, one_of, refuse, whole

# A schedule with more different multipliers is rounded, at a cost of less than 1 percent.
MOST_MULTIPLIERS = 4096
# A larger budget gives no useful guarantee.
LARGEST_BUDGET = 1e6
# More steps than any run takes, and small enough for every sum over them.
MOST_STEPS = 10**18


class StepArguments(TypedDict, total=False):
    """How the batches of a step are drawn; see `accounting.epsilon`."""

    sample_rate: float | None
    sampling: str | Sampling
    adjacency: str | Adjacency | None
    unit: str | Unit
    period: int | None
    dataset_size: int | None
    max_batch_size: int | None


class RunArguments(StepArguments, total=False):
    """A whole run, for functions that do not search for its noise or its length."""

    noise_multiplier: float | Sequence[float]
    steps: int | None


def budget(epsilon: Any) -> float:
    """An epsilon to stay within."""
    return number("epsilon", epsilon, above=0, below=LARGEST_BUDGET)


def probability(name: str, value: Any) -> float:
    """A number in (0, 1), such as delta."""
    return number(name, value, above=0, below=1)


def count(name: str, value: Any, least: int = 0) -> int:
    """A number of steps or units; a float such as 1e4 is accepted if it is whole."""
    if isinstance(value, (float, np.floating)) and value.is_integer():
        value = int(value)
    return whole(name, value, least, MOST_STEPS)


def event(
    noise_multiplier: Any = 1.0,
    sample_rate: Any = None,
    sampling: Any = Sampling.POISSON,
    adjacency: Any = None,
    *,
    unit: Any = Unit.RECORD,
    period: Any = None,
    dataset_size: Any = None,
    max_batch_size: Any = None,
) -> Event:
    """The event that the arguments describe. For `shuffled`, `period` and `sample_rate` = 1 / period are equivalent."""
    scheme: Sampling = one_of("sampling", sampling, Sampling)
    relation: Adjacency = SUPPORTED[scheme][0] if adjacency is None else one_of("adjacency", adjacency, Adjacency)
    steps_per_pass, rate = 1, 1.0
    if scheme is Sampling.SHUFFLED:
        steps_per_pass = _period(sample_rate, period)
        rate = 1 / steps_per_pass
    elif period not in (None, 1):
        refuse("period", period, "left out unless sampling is 'shuffled'")
    elif scheme is Sampling.FULL:
        if sample_rate not in (None, 1):
            refuse("sample_rate", sample_rate, "1 or left out if sampling is 'full'")
    else:
        rate = number("sample_rate", sample_rate, above=0, most=1)
    excess = _excess(scheme, rate, dataset_size, max_batch_size)
    noise = number("noise_multiplier", noise_multiplier, least=0)
    return Event(scheme, relation, one_of("unit", unit, Unit), noise, rate, steps_per_pass, excess)


def history(noise_multiplier: Any = None, steps: Any = None, **kind: Any) -> list[Entry]:
    """The described history: `steps` events of one multiplier, or one per multiplier of a sequence."""
    if not isinstance(noise_multiplier, (list, tuple)) and np.ndim(noise_multiplier) == 0:
        return [Entry(event(noise_multiplier, **kind), count("steps", steps))]
    multipliers = _multipliers(noise_multiplier)
    if steps is not None and count("steps", steps) != len(multipliers):
        refuse("steps", steps, f"left out or {len(multipliers)}, the length of noise_multiplier")
    step = event(**kind)
    if step.sampling is Sampling.SHUFFLED:
        # A unit takes part in one secret step per epoch: the worst case is the step with the least noise.
        epochs = [multipliers[i : i + step.period] for i in range(0, len(multipliers), step.period)]
        return [Entry(replace(step, noise_multiplier=float(epoch.min())), len(epoch)) for epoch in epochs]
    # The order of independent steps has no effect.
    values, counts = np.unique(_with_fewer_values(multipliers), return_counts=True)
    return [Entry(replace(step, noise_multiplier=z), n) for z, n in zip(values.tolist(), counts.tolist(), strict=True)]


def _multipliers(schedule: Any) -> NDArray[np.float64]:
    try:
        values = np.asarray(schedule, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        values = np.array([math.nan])
    if values.ndim != 1 or not (np.isfinite(values) & (values >= 0)).all():
        raise ConfigurationError(
            "noise_multiplier: a schedule must be a flat sequence of finite numbers of at least 0, one for each step."
        )
    return values


def _with_fewer_values(multipliers: NDArray[np.float64]) -> NDArray[np.float64]:
    """The multipliers, or fewer different ones that cost no less: rounded down to a geometric grid.

    Even if the largest is 10^8 times the smallest, this lowers each of them by less than half a percent.
    """
    noisy = multipliers[multipliers > 0]
    if len(np.unique(noisy)) <= MOST_MULTIPLIERS:
        return multipliers
    grid = np.geomspace(noisy.min(), noisy.max(), MOST_MULTIPLIERS)
    grid[0] = noisy.min()  # never above it by rounding
    rounded: NDArray[np.float64] = grid[np.searchsorted(grid, noisy, side="right") - 1]
    return np.concatenate([multipliers[multipliers == 0], rounded])


def _excess(scheme: Sampling, rate: float, dataset_size: Any, max_batch_size: Any) -> float:
    """The probability that a batch is truncated."""
    if scheme is not Sampling.TRUNCATED_POISSON:
        if max_batch_size is not None:
            refuse("max_batch_size", max_batch_size, "left out unless sampling is 'truncated-poisson'")
        return 0.0
    if dataset_size is None:
        refuse("dataset_size", None, "given if sampling is 'truncated-poisson': a bound on its units")
    size = count("dataset_size", dataset_size, least=1)
    if max_batch_size is None:
        return truncation.excess(size, rate, truncation.default_limit(size, rate))
    return truncation.excess(size, rate, count("max_batch_size", max_batch_size, least=1))


def _period(sample_rate: Any, period: Any) -> int:
    if period is None and sample_rate is None:
        refuse("period", None, "given if sampling is 'shuffled': the number of steps in one epoch")
    rate = None if sample_rate is None else number("sample_rate", sample_rate, above=0, most=1)
    steps = round(1 / (rate or 1.0)) if period is None else count("period", period, least=1)
    if rate is not None and abs(rate * steps - 1) > 1e-6:
        refuse("sample_rate", sample_rate, "1 / period, for a whole period, if sampling is 'shuffled'")
    return steps
