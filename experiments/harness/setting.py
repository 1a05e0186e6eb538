"""Base class of settings: the key of results, and copies with changes."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

Kind = TypeVar("Kind", bound="Keyed")


class Keyed:
    """Base of frozen dataclasses that hold everything that determines the result of a run except the seed.

    The key has the fields of `NAMED`, then every other field that is not at its default, floats to `DIGITS` digits or
    in full. Stored results are found by key, so neither fields nor defaults may change.
    """

    NAMED: ClassVar[tuple[str, ...]] = ()
    DIGITS: ClassVar[int | None] = None

    @cached_property
    def key(self) -> str:
        """A unique name."""
        unusual = []
        for f in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value = getattr(self, f.name)
            if f.name not in self.NAMED and value != f.default:
                is_short = self.DIGITS is not None and isinstance(value, float)
                unusual.append(f"{f.name}=" + (f"{value:.{self.DIGITS}g}" if is_short else f"{value}"))
        return " ".join(["/".join(str(getattr(self, name)) for name in self.NAMED), *unusual])

    def but(self: Kind, **changes: Any) -> Kind:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[type-var]
