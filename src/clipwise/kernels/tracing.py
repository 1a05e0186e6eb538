"""Whether the current thread traces a step into a graph (engine/tracing.py).

A trace runs on tensors without memory. In it no raw kernel is launched, and nothing is put into or taken from a cache
of tensors: the twins in plain torch are traced instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local

_state = local()


def is_tracing() -> bool:
    """Whether this thread is in a `tracing` block."""
    return getattr(_state, "is_tracing", False)


@contextmanager
def tracing() -> Iterator[None]:
    """A block in which tensors have no memory."""
    before = is_tracing()
    _state.is_tracing = True
    try:
        yield
    finally:
        _state.is_tracing = before
