"""Old names: public ones, which work with a DeprecationWarning until 0.3.0, and those in files of older versions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from enum import EnumMeta
from importlib import import_module
from typing import Any, TypeVar

from clipwise import errors

C = TypeVar("C", bound=Callable[..., Any])
T = TypeVar("T")

# Values of arguments.
VALUES = {"mini-set": "microbatch"}

# Keys in ledgers and checkpoints.
_RECORDED = {
    "averaged": "ema",
    "averaged_views": "augmentation_multiplicity",
    "mini_sets": "microbatches",
    "mini_set_size": "microbatch_size",
}


def warn(old: str, new: str) -> None:
    """Warn that `old` is deprecated."""
    errors.warn(f"{old} is deprecated and will be removed in clipwise 0.3.0: use {new}.", DeprecationWarning)


def renamed_arguments(**names: str | Callable[[Any], str]) -> Callable[[C], C]:
    """A decorator: the function also accepts old keywords. A new name may be chosen from the value given."""

    def decorate(function: C) -> C:
        @functools.wraps(function)
        def with_old_names(*args: Any, **kwargs: Any) -> Any:
            for old in names.keys() & kwargs.keys():
                value, name = kwargs.pop(old), names[old]
                new = name if isinstance(name, str) else name(value)
                if new in kwargs:
                    raise TypeError(f"{old} is the old name of {new}: give {new} only.")
                warn(f"{old}=", f"{new}=")
                kwargs[new] = value
            return function(*args, **kwargs)

        return with_old_names  # type: ignore[return-value]

    return decorate


def renamed_attributes(**names: str) -> Callable[[type[T]], type[T]]:
    """A class decorator: instances also have the attributes, properties or methods under their old names."""

    def decorate(cls: type[T]) -> type[T]:
        for old, new in names.items():

            def get(self: Any, old: str = old, new: str = new) -> Any:
                warn(f"{cls.__name__}.{old}", f"{cls.__name__}.{new}")
                return getattr(self, new)

            setattr(cls, old, property(get, doc=f"Deprecated: use `{new}`."))
        return cls

    return decorate


def renamed_fields(**names: str) -> Callable[[type[T]], type[T]]:
    """A class decorator for dataclasses: old names work as arguments and as attributes."""

    def decorate(cls: type[T]) -> type[T]:
        setattr(cls, "__init__", renamed_arguments(**names)(cls.__init__))  # noqa: B010
        return renamed_attributes(**names)(cls)

    return decorate


def moved(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a module whose `names` moved to other modules: `{"Old": "package.module.New"}`."""

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, new = names[name].rpartition(".")
        warn(f"{module}.{name}", names[name])
        return getattr(import_module(home), new)

    return get


class RenamedMembers(EnumMeta):
    """The metaclass of an enumeration with a mapping `renamed_members` from old member names to new ones."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_") or name not in (renamed := cls.renamed_members()):
            raise AttributeError(name)
        warn(f"{cls.__name__}.{name}", f"{cls.__name__}.{renamed[name]}")
        return cls[renamed[name]]


def current_names(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping of a ledger or checkpoint with current keys and values. Nested mappings are not changed."""
    return {
        _RECORDED.get(key, key): VALUES.get(value, value) if isinstance(value, str) else value
        for key, value in recorded.items()
    }


def current_strategy(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The recorded description of a strategy with current names, also in that of its policy."""
    found = current_names(recorded)
    if isinstance(found.get("parts"), Mapping):
        found["parts"] = current_names(found["parts"])
    return found
