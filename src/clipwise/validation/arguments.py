"""Checks of arguments: numbers, words, paths, models and functions. An error names the argument and what it may be."""

from __future__ import annotations

import inspect
import math
import numbers
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

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


def not_negative(argument: str, value: float) -> float:
    """The argument as it is; refused unless it is a finite number from 0 on."""
    given: object = value  # whatever its type promises
    number = isinstance(given, numbers.Real) and not isinstance(given, bool)
    if not (number and math.isfinite(value) and value >= 0):
        raise ConfigurationError(f"{argument} must be a finite number from 0 on, not {value!r}.")
    return value


def count(argument: str, value: int) -> int:
    """The argument as an int; refused unless it is a whole number of at least 1."""
    given: object = value
    if isinstance(given, bool) or not isinstance(given, (int, np.integer)) or value < 1:
        raise ConfigurationError(f"{argument} must be a whole number of at least 1, not {value!r}.")
    return int(value)


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


def positive(name: str, value: object) -> float:
    """A positive, finite number of any kind (those of numpy too), or an error that names the argument."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    found = float(value) if is_number else math.nan  # type: ignore[arg-type]
    if not (math.isfinite(found) and found > 0):
        raise ConfigurationError(f"{name} must be a positive, finite number, not {value!r}.")
    return found


def require_known(argument: str, value: object, known: Iterable[str]) -> None:
    """Refuse whatever is not one of the known words, other types as well: an array would not even compare."""
    words = list(known)
    if not isinstance(value, str) or value not in words:
        raise ConfigurationError(
            f"{argument}={value!r} is not known: use one of {', '.join(map(repr, words))}."
        )
