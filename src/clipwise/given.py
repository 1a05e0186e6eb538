"""Models, functions and numbers that a user gives."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any

from torch import nn

from clipwise.errors import ConfigurationError


def require_module(given: object) -> None:
    """Refuse what is no model."""
    if not isinstance(given, nn.Module):
        raise ConfigurationError(f"model must be a torch.nn.Module, not {type(given).__name__}.")


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
