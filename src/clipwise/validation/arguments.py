"""Checks of arguments: numbers, words, paths, models and functions. An error names the argument and what it may be."""

from __future__ import annotations

import inspect
import math
import numbers
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NoReturn

import numpy as np
from torch import nn

from clipwise.errors import ClipwiseError, ConfigurationError


def plain(value: Any) -> Any:
    """Numbers of numpy as Python's own, in mappings, lists and tuples too; all else as it is.

    They would be in checkpoints otherwise, and those are loaded with `weights_only=True`, which does not know them.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        found = {key: plain(member) for key, member in value.items()}
        return value if all(found[key] is member for key, member in value.items()) else found
    if type(value) in (list, tuple):
        members = [plain(member) for member in value]
        same = all(new is old for new, old in zip(members, value, strict=True))
        return value if same else type(value)(members)
    return value


def with_plain_numbers(settings: Any) -> None:
    """For the beginning of a dataclass's `__post_init__`: its numbers are checked, used and told as Python's own."""
    for each in fields(settings):
        object.__setattr__(settings, each.name, plain(getattr(settings, each.name)))


def require_path(argument: str, given: object) -> None:
    """Refuse what names no file."""
    if not isinstance(given, (str, os.PathLike)):
        raise ConfigurationError(f"{argument} must be the path of a file, not {type(given).__name__}.")


def require_bool(argument: str, given: object) -> None:
    """Refuse what is neither True nor False: a word such as "no" would count as True."""
    if not isinstance(given, bool):
        raise ConfigurationError(f"{argument} must be True or False, not {given!r}.")


@contextmanager
def naming(argument: str, taker: str = "the model") -> Iterator[None]:
    """Data runs through the model, or a loss, in this block: what goes wrong is told with the name of the argument."""
    try:
        yield
    except ClipwiseError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{argument}: {taker} does not take such rows ({type(error).__name__}: {error}). Give them as it is "
            "trained on them."
        ) from error


def require_module(given: object) -> None:
    """Refuse what is no model."""
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
    """`value` as a finite float within the limits that are given."""
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
    """`value` as an int from `least` to `most`; only integers of Python and numpy are accepted."""
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_whole or value < least or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most:g}"
        refuse(name, value, f"a whole number {limits}")
    return int(value)


def one_of(name: str, value: Any, allowed: Iterable[Any]) -> Any:
    """The member of `allowed` that `value` is or names; other types are refused as well."""
    members = list(allowed)
    for member in members:
        if isinstance(value, str) and value in (member, str(member)):
            return member
    words = ", ".join(repr(str(member)) for member in members)
    raise ConfigurationError(f"{name}={_shown(value)} is not known: use one of {words}.")


def refuse(name: str, value: Any, allowed: str) -> NoReturn:
    """Raise the error of an argument that is not what it must be."""
    raise ConfigurationError(f"{name} must be {allowed}, not {_shown(value)}.")


def _shown(value: Any) -> str:
    """The value itself only if it is a plain one: an array in its place could hold data."""
    if isinstance(value, str):
        return repr(str(value))
    is_plain = value is None or isinstance(value, (bool, numbers.Number))
    return repr(value) if is_plain else f"a {type(value).__name__}"


def require_takes(argument: str, function: Callable[..., Any], how: str, *arguments: Any) -> None:
    """Refuse a function that does not take what it is called with, `how` in words.

    What goes wrong inside the function stays its own error.
    """
    if not callable(function):
        raise ConfigurationError(f"{argument} must be a function {how}, not {type(function).__name__}.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C do not tell
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigurationError(
            f"{argument} is called as {how}, here with {len(arguments)} arguments, and does not take that: {error}."
        ) from error
