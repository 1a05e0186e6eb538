"""Words that an argument may be."""

from __future__ import annotations

from collections.abc import Iterable

from clipwise.errors import ConfigurationError


def require_known(argument: str, value: object, known: Iterable[str]) -> None:
    """Refuse whatever is not one of the known words, other types as well: an array would not even compare."""
    words = list(known)
    if not isinstance(value, str) or value not in words:
        raise ConfigurationError(
            f"{argument}={value!r} is not known: use one of {', '.join(map(repr, words))}."
        )
