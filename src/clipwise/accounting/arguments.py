"""Checks what a user asks for, and turns it into an event. Messages name the argument and what it may be."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NoReturn

from clipwise.errors import ConfigurationError
from clipwise.privacy import SUPPORTED, Adjacency, Event, Sampling, Unit


def number(name: str, value: Any, *, above: float, below: float, open_end: bool = True) -> float:
    """`value` as a float in (above, below), or in [above, below) if the lower end is not open."""
    try:
        result = float(value)
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    if isinstance(value, bool | str) or not above <= result < below or (open_end and result == above):
        limits = f"greater than {above:g}" if open_end else f"at least {above:g}"
        limits += " and finite" if math.isinf(below) else f" and less than {below:g}"
        _refuse(name, value, f"a number {limits}")
    return result


# More steps than any run takes, and few enough for every sum over them.
MOST_STEPS = 10**18


def whole(name: str, value: Any, *, at_least: int = 0) -> int:
    """`value` as an int; a float is taken if it is whole."""
    try:
        result = int(value)
    except (TypeError, ValueError, OverflowError):
        result = at_least - 1
    if isinstance(value, bool | str) or result != value or not at_least <= result <= MOST_STEPS:
        _refuse(name, value, f"a whole number from {at_least} to {MOST_STEPS:g}")
    return result


def one_of(name: str, value: Any, allowed: Iterable[Any]) -> Any:
    """The member of `allowed` that `value` is or names."""
    members = list(allowed)
    for member in members:
        if value == member or value == str(member):
            return member
    _refuse(name, value, "one of " + ", ".join(repr(str(member)) for member in members))


def event(
    noise_multiplier: Any, sample_rate: Any, sampling: Any, adjacency: Any = None, period: Any = None
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
    noise = number("noise_multiplier", noise_multiplier, above=0, below=math.inf, open_end=False)
    return Event(scheme, relation, Unit.RECORD, noise, rate, steps_per_pass)


def _rate(value: Any) -> float:
    if value == 1 and not isinstance(value, bool):
        return 1.0
    try:
        return number("sample_rate", value, above=0, below=1)
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
