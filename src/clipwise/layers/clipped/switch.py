"""Whether upstream gradients are clipped in a backward pass, and who looks at them.

They are, unless somebody examines a graph: a probe (gradients/layout.py) needs a backward pass that is linear in the
weights of the losses, and a clip is not. One switch for all threads, since torch runs backward passes on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

Watcher = Callable[[Any, Tensor], None]  # a node of the graph, and the gradient of its output

_suspended = 0
_watcher: Watcher | None = None


@contextmanager
def unclipped(watcher: Watcher | None = None) -> Iterator[None]:
    """In this block backward passes do not clip. Their results are of single examples, and must not be released."""
    global _suspended, _watcher
    before, _watcher = _watcher, watcher
    _suspended += 1
    try:
        yield
    finally:
        _suspended -= 1
        _watcher = before


def is_clipping() -> bool:
    """Whether upstream gradients are clipped now."""
    return _suspended == 0


def saw(node: Any, g: Tensor) -> None:
    """Called by every clipped layer in a backward pass."""
    if _watcher is not None:
        _watcher(node, g)
