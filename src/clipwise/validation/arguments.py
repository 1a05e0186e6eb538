"""Checks of arguments. Each error names the argument and its allowed values."""

from __future__ import annotations

import inspect
import math
import numbers
import operator
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NoReturn

import numpy as np
from torch import nn

from clipwise.deprecation import VALUES, warn
from clipwise.errors import ClipwiseError, ConfigurationError


def plain(value: Any) -> Any:
    """Convert NumPy scalars to Python numbers, also inside dicts, lists and tuples.

    Checkpoints are loaded with `weights_only=True`, which rejects NumPy scalars.
    """
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {key: plain(member) for key, member in value.items()}
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


def with_plain_numbers(settings: Any) -> None:
    """Convert the NumPy scalars among a dataclass's fields. Call it first in `__post_init__`."""
    for each in fields(settings):
        object.__setattr__(settings, each.name, plain(getattr(settings, each.name)))


def require_path(argument: str, given: object) -> None:
    """Raise if `given` is not a path."""
    if not isinstance(given, (str, os.PathLike)):
        raise ConfigurationError(f"{argument} must be the path of a file, not {type(given).__name__}.")


def require_bool(argument: str, given: object) -> None:
    """Raise if `given` is not a bool: a string such as "no" is truthy."""
    if not isinstance(given, bool):
        raise ConfigurationError(f"{argument} must be True or False, not {given!r}.")


@contextmanager
def naming(argument: str, taker: str = "the model") -> Iterator[None]:
    """Name the argument in errors that the model or the loss raises on its data inside this block."""
    try:
        yield
    except ClipwiseError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{argument}: {taker} does not take such rows ({type(error).__name__}: {error}). Give them in the form "
            "used in training."
        ) from error


def require_module(given: object) -> None:
    """Raise if `given` is not an `nn.Module`."""
    if not isinstance(given, nn.Module):
        raise ConfigurationError(f"model must be a torch.nn.Module, not {type(given).__name__}.")


def number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
) -> float:
    """Return `value` as a float. Raise if it is not finite or outside of the limits."""
    # A tensor is no number: settings are written to ledgers and checkpoints as they are.
    is_number = isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))
    try:
        found = float(value) if is_number else math.nan
    except OverflowError:
        found = math.nan
    limits = [
        (above, "greater than", operator.gt),
        (least, "at least", operator.ge),
        (below, "less than", operator.lt),
        (most, "at most", operator.le),
    ]
    given = [(limit, words, holds) for limit, words, holds in limits if limit is not None]
    if not (math.isfinite(found) and all(holds(found, limit) for limit, _, holds in given)):
        words = " and ".join(f"{words} {limit:g}" for limit, words, _ in given)
        refuse(name, value, f"a finite number {words and 'that is '}{words}".strip())
    return found


def whole(name: str, value: Any, least: int = 0, most: int | None = None) -> int:
    """Return `value` as an int from `least` to `most`. Only Python and NumPy integers are accepted."""
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_whole or value < least or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most:g}"
        refuse(name, value, f"a whole number {limits}")
    return int(value)


def one_of(name: str, value: Any, allowed: Iterable[Any]) -> Any:
    """Return the member of `allowed` that `value` is or names, or raise."""
    members = list(allowed)
    if isinstance(value, str) and (new := VALUES.get(value)) in members:
        warn(f"{name}={value!r}", repr(new))
        value = new
    for member in members:
        if isinstance(value, str) and value in (member, str(member)):
            return member
    words = ", ".join(repr(str(member)) for member in members)
    raise ConfigurationError(f"{name}={_shown(value)} is not known: use one of {words}.")


def refuse(name: str, value: Any, allowed: str) -> NoReturn:
    """Raise the error for an invalid argument."""
    raise ConfigurationError(f"{name} must be {allowed}, not {_shown(value)}.")


def _shown(value: Any) -> str:
    """The value for a message, or only its type if it could hold data."""
    if isinstance(value, str):
        return repr(str(value))
    is_plain = value is None or isinstance(value, (bool, numbers.Number))
    return repr(value) if is_plain else f"a {type(value).__name__}"


def require_takes(argument: str, function: Callable[..., Any], how: str, *arguments: Any) -> None:
    """Raise if `function` cannot be called with `arguments`; `how` describes the call. It is not called here."""
    if not callable(function):
        raise ConfigurationError(f"{argument} must be a function {how}, not {type(function).__name__}.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some C functions have no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigurationError(
            f"{argument} is called as {how}, here with {len(arguments)} arguments, and does not accept them: {error}."
        ) from error
