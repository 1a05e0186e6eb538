"""Checks what a user asks for, and turns it into an event. Messages name the argument and what it may be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from clipwise.accounting import truncation
from clipwise.errors import ConfigurationError
from clipwise.privacy import SUPPORTED, Adjacency, Entry, Event, Sampling, Unit


def number(name: str, value: Any, *, above: float, below: float, open_end: bool = True) -> float:
    """`value` as a float in (above, below), or in [above, below) if the lower end is not open."""
    try:
        result = float(value)
    except (
        TypeError,
        ValueError,
        OverflowError,
        RuntimeError,
    ):  # the last is what a tensor of many numbers raises
        result = math.nan
    if isinstance(value, bool | str) or not above <= result < below or (open_end and result == above):
        limits = f"greater than {above:g}" if open_end else f"at least {above:g}"
        limits += " and finite" if math.isinf(below) else f" and less than {below:g}"
        _refuse(name, value, f"a number {limits}")
    return result


# A schedule with more different multipliers than this is rounded, at a cost of less than 1 percent.
MOST_MULTIPLIERS = 4096
# A budget beyond this promises nothing: e^epsilon is no number any more long before.
LARGEST_BUDGET = 1e6


def budget(epsilon: Any) -> float:
    """An epsilon to stay within."""
    return number("epsilon", epsilon, above=0, below=LARGEST_BUDGET)


# More steps than any run takes, and few enough for every sum over them.
MOST_STEPS = 10**18


def whole(name: str, value: Any, *, at_least: int = 0) -> int:
    """`value` as an int; a float is taken if it is whole."""
    try:
        result = int(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        _refuse(name, value, f"a whole number from {at_least} to {MOST_STEPS:g}")
    if isinstance(value, bool | str) or result != value or not at_least <= result <= MOST_STEPS:
        _refuse(name, value, f"a whole number from {at_least} to {MOST_STEPS:g}")
    return result


def one_of(name: str, value: Any, allowed: Iterable[Any]) -> Any:
    """The member of `allowed` that `value` is or names."""
    members = list(allowed)
    for member in members:
        if isinstance(value, str) and value in (member, str(member)):
            return member
    _refuse(name, value, "one of " + ", ".join(repr(str(member)) for member in members))


def event(
    noise_multiplier: Any,
    sample_rate: Any,
    sampling: Any,
    adjacency: Any = None,
    period: Any = None,
    unit: Any = Unit.RECORD,
    dataset_size: Any = None,
    max_batch_size: Any = None,
) -> Event:
    """The event that a user describes. For `shuffled`, period and sample_rate = 1 / period say the same."""
    scheme: Sampling = one_of("sampling", sampling, Sampling)
    relation: Adjacency = (
        SUPPORTED[scheme][0] if adjacency is None else one_of("adjacency", adjacency, Adjacency)
    )
    steps_per_pass, rate = 1, 1.0
    if scheme is Sampling.SHUFFLED:
        steps_per_pass = _period(sample_rate, period)
        rate = 1 / steps_per_pass
    elif period not in (None, 1):
        _refuse("period", period, "left out unless sampling is 'shuffled'")
    elif scheme is Sampling.FULL:
        if sample_rate not in (None, 1):
            _refuse("sample_rate", sample_rate, "1 or left out if sampling is 'full'")
    else:
        rate = _rate(sample_rate)
    excess = _excess(scheme, rate, dataset_size, max_batch_size)
    noise = number("noise_multiplier", noise_multiplier, above=0, below=math.inf, open_end=False)
    return Event(scheme, relation, one_of("unit", unit, Unit), noise, rate, steps_per_pass, excess)


def history(noise_multiplier: Any, steps: Any, *args: Any) -> list[Entry]:
    """The history that a user describes: `steps` events of one multiplier, or one event for each of many.

    Args:
        noise_multiplier: a number, or a sequence with the multiplier of each step, fixed beforehand.
        steps: how many; for a sequence None or its length.
        args: the other arguments of `event`.
    """
    if not _is_sequence(noise_multiplier):
        return [Entry(event(noise_multiplier, *args), whole("steps", steps))]
    multipliers = _multipliers(noise_multiplier)
    if steps is not None and whole("steps", steps) != len(multipliers):
        _refuse("steps", steps, f"left out or {len(multipliers)}, the length of noise_multiplier")
    kind = event(1.0, *args)
    if kind.sampling is Sampling.SHUFFLED:
        # A unit takes part in one step of an epoch, nobody knows in which: at worst in the one with least
        # noise.
        epochs = [multipliers[i : i + kind.period] for i in range(0, len(multipliers), kind.period)]
        return [Entry(replace(kind, noise_multiplier=float(epoch.min())), len(epoch)) for epoch in epochs]
    # The order of independent steps plays no part.
    values, counts = np.unique(_with_fewer_values(multipliers), return_counts=True)
    return [
        Entry(replace(kind, noise_multiplier=z), count)
        for z, count in zip(values.tolist(), counts.tolist(), strict=True)
    ]


def _is_sequence(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str)


def _multipliers(schedule: Any) -> NDArray[np.float64]:
    try:
        values = np.asarray(schedule, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        values = np.array([math.nan])
    if values.ndim != 1 or not (np.isfinite(values) & (values >= 0)).all():
        raise ConfigurationError(
            "noise_multiplier is not possible: a schedule is a flat sequence of numbers that are finite and at "
            "least 0, one for each step."
        )
    return values


def _with_fewer_values(multipliers: NDArray[np.float64]) -> NDArray[np.float64]:
    """The multipliers, or fewer different ones that cost no less: rounded down to a geometric grid.

    Even if the largest is 10^8 times the smallest, that takes less than half a percent off any of them.
    """
    noisy = multipliers[multipliers > 0]
    if len(np.unique(noisy)) <= MOST_MULTIPLIERS:
        return multipliers
    grid = np.geomspace(noisy.min(), noisy.max(), MOST_MULTIPLIERS)
    grid[0] = noisy.min()  # not a rounding above it
    rounded: NDArray[np.float64] = grid[np.searchsorted(grid, noisy, side="right") - 1]
    return np.concatenate([multipliers[multipliers == 0], rounded])


def _excess(scheme: Sampling, rate: float, dataset_size: Any, max_batch_size: Any) -> float:
    """The probability that a batch is cut. Only then do the number of units and the limit play a part."""
    if scheme is not Sampling.TRUNCATED_POISSON:
        if max_batch_size is not None:
            _refuse("max_batch_size", max_batch_size, "left out unless sampling is 'truncated-poisson'")
        return 0.0
    if dataset_size is None:
        _refuse(
            "dataset_size", dataset_size, "given if sampling is 'truncated-poisson': a bound on its units"
        )
    size = whole("dataset_size", dataset_size, at_least=1)
    if max_batch_size is None:
        limit = truncation.default_limit(size, rate)
    else:
        limit = whole("max_batch_size", max_batch_size, at_least=1)
    return truncation.excess(size, rate, limit)


def _rate(value: Any) -> float:
    try:
        return number("sample_rate", value, above=0, below=math.nextafter(1, 2))
    except ConfigurationError:
        _refuse("sample_rate", value, "a number in (0, 1]")


def _period(sample_rate: Any, period: Any) -> int:
    if period is None:
        if sample_rate is None:
            _refuse("period", period, "given if sampling is 'shuffled': the number of steps in one epoch")
        passes = 1 / _rate(sample_rate)
        if abs(passes - round(passes)) > 1e-6 * passes:
            _refuse("sample_rate", sample_rate, "1 / period, for a whole period, if sampling is 'shuffled'")
        return round(passes)
    steps = whole("period", period, at_least=1)
    if sample_rate is not None and abs(_rate(sample_rate) * steps - 1) > 1e-6:
        _refuse("sample_rate", sample_rate, "1 / period or left out if sampling is 'shuffled'")
    return steps


def _refuse(name: str, value: Any, allowed: str) -> NoReturn:
    raise ConfigurationError(f"{name}={value!r} is not possible: it must be {allowed}.")
