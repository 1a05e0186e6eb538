"""What modules keep beside tensors: numbers, NumPy arrays and containers, in the attributes of the module itself.

A running mean in a NumPy array or a list leaves with a pickled model just as one in a buffer does. What a forward pass
changes is found by comparing two snapshots. Strings, flags and objects of other libraries are not looked at; an object
of a class that is defined beside its module is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_BUILT_IN = frozenset(vars(nn.Module()))  # what every module has: dictionaries of torch's own, and `training`
_DEEPEST = 4
_MOST = 10_000  # entries of one container
_MOST_OF_ARRAY = 1_000_000
_IGNORED = (str, bytes, bool, type(None), nn.Module, torch.nn.Parameter)

Snapshot = dict[
    str, tuple[object, object]
]  # by name: the value where it is a whole number, and what it holds


class PlainState:
    """Compares what the modules of a model keep with what they kept before.

    A whole number may advance by the same amount in each forward pass, other than by the number of examples: a count of
    calls is public.
    """

    def __init__(self) -> None:
        self._before: Snapshot = {}
        self._advances: dict[str, int] = {}
        self._sizes: set[int] = set()

    def remember(self, modules: Iterable[tuple[str, nn.Module]], sizes: set[int]) -> None:
        """Called when a batch is handed out. `sizes` are the lengths of its tensors."""
        self._before, self._sizes = _snapshot(modules), sizes - {1}

    def changed(self, modules: Iterable[tuple[str, nn.Module]]) -> str | None:
        """The name of an attribute that was changed since, other than a count of calls."""
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
    found: Snapshot = {}
    for prefix, module in modules:
        for name, value in vars(module).items():
            if name not in _BUILT_IN and not isinstance(value, (Tensor, *_IGNORED)):
                full = f"{prefix}.{name}" if prefix else name
                found[full] = (
                    value if type(value) is int else None,
                    _held(value, type(module).__module__, 0),
                )
    return found


def _held(value: Any, home: str, depth: int) -> object:
    """What a value holds, in a form that can be compared; None for what is not looked at."""
    if isinstance(value, (int, float, complex, np.number)) and not isinstance(value, bool):
        return repr(value)  # NaN equals itself
    if isinstance(value, np.ndarray):
        entries = value.reshape(-1)[:: 1 + value.size // _MOST_OF_ARRAY]
        return value.shape, repr(entries) if value.dtype == object else hash(entries.tobytes())
    if isinstance(value, Tensor):
        return id(value), value._version, value.shape
    if depth == _DEEPEST or (isinstance(value, _IGNORED) and depth == 0):
        return None
    if isinstance(value, (str, bytes, bool)):
        return value
    if isinstance(value, Mapping):
        value = list(value.items())
    elif isinstance(value, Set):
        return len(value), frozenset(map(repr, list(value)[:_MOST]))
    elif type(value).__module__ == home and hasattr(value, "__dict__") and not isinstance(value, nn.Module):
        value = list(vars(value).items())
    elif not isinstance(value, (list, tuple, deque)):
        return None
    members = list(value)
    return len(members), tuple(_held(member, home, depth + 1) for member in members[:_MOST])
