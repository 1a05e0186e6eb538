"""Compares plain attributes of modules: a forward pass may not store statistics of the batch in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Set
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor, nn

_BUILT_IN = frozenset(vars(nn.Module()))  # attributes of every module
_DEEPEST = 4
_MOST = 10_000  # entries of one container
_MOST_OF_ARRAY = 1_000_000
_IGNORED = (str, bytes, bool, type(None), nn.Module, nn.Parameter)

Snapshot = dict[str, tuple[object, object]]  # by name: the value if it is an int, and comparable contents


class PlainState:
    """Compares numbers, NumPy arrays, containers and objects of the same Python module in the attributes of modules.

    An int may advance by the same amount in each forward pass, unless that is the number of examples: a count of calls
    is public.
    """

    def __init__(self) -> None:
        self._before: Snapshot = {}
        self._advances: dict[str, int] = {}
        self._sizes: set[int] = set()

    def remember(self, modules: Iterable[tuple[str, nn.Module]], sizes: set[int]) -> None:
        self._before, self._sizes = _snapshot(modules), sizes - {1}

    def changed(self, modules: Iterable[tuple[str, nn.Module]]) -> str | None:
        """The name of an attribute that changed since `remember`, other than a count of calls; or None."""
        now = _snapshot(modules)
        for name in sorted(now.keys() | self._before.keys()):
            before, after = self._before.get(name, (None, None)), now.get(name, (None, None))
            if before[1] != after[1] and not self._is_count(name, before[0], after[0]):
                return name
        self._before = now
        return None

    def _is_count(self, name: str, before: object, after: object) -> bool:
        if not isinstance(before, int) or not isinstance(after, int):
            return False
        advance = after - before
        if advance in self._sizes and name not in self._advances:
            return False
        return self._advances.setdefault(name, advance) == advance


def _snapshot(modules: Iterable[tuple[str, nn.Module]]) -> Snapshot:
    return {
        f"{prefix}.{name}" if prefix else name: (
            value if type(value) is int else None,
            _held(value, type(module).__module__),
        )
        for prefix, module in modules
        for name, value in vars(module).items()
        if name not in _BUILT_IN and not isinstance(value, (Tensor, *_IGNORED))
    }


def _held(value: Any, home: str, depth: int = 0) -> object:
    """The contents of a value in a comparable form; None if they are not compared."""
    if isinstance(value, (int, float, complex, np.number, str, bytes)):
        return repr(value)  # NaN equals itself
    if isinstance(value, np.ndarray):
        return value.shape, hash(value.reshape(-1)[:: 1 + value.size // _MOST_OF_ARRAY].tobytes())
    if isinstance(value, Tensor):
        return id(value), value._version, value.shape
    if isinstance(value, Mapping):
        value = list(value.items())
    elif type(value).__module__ == home and hasattr(value, "__dict__") and not isinstance(value, nn.Module):
        value = list(vars(value).items())
    if depth == _DEEPEST or not isinstance(value, (list, tuple, deque, Set)):
        return None
    return len(value), tuple(_held(member, home, depth + 1) for member in islice(value, _MOST))
