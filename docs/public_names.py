"""Griffe extension: `clipwise.audit.canary` is the function, although a module has the same name.

A package may define or import a function under the name of one of its modules. Python then gives the function, Griffe
the module. This extension puts the function back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import griffe


class PublicNames(griffe.Extension):
    """Lets names of functions win over names of modules."""

    def __init__(self) -> None:
        super().__init__()
        self._own: dict[str, dict[str, Any]] = {}

    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        """Keep what a package names itself, before its modules are added."""
        self._own[mod.path] = dict(mod.members)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Put functions in the place of modules of the same name."""
        packages = list(_packages(pkg))
        for member in (member for package in packages for member in package.members.values()):
            if member.is_alias:
                with contextlib.suppress(griffe.AliasResolutionError, griffe.CyclicAliasError):
                    member.resolve_target()  # type: ignore[union-attr]
        for package in packages:
            for name, own in self._own.get(package.path, {}).items():
                now = package.members.get(name)
                if own is not now and isinstance(now, griffe.Module):
                    package.set_member(name, now.members[name] if own.is_alias else own)


def _packages(package: griffe.Module) -> Iterator[griffe.Module]:
    yield package
    for member in package.members.values():
        if isinstance(member, griffe.Module):
            yield from _packages(member)
