"""Global settings of backward passes through clipped layers: clipping, observation, clearing of examples.

Upstream gradients are clipped except while a probe examines a graph (gradients/layout.py). The setting is shared by all
threads, since torch runs backward passes on its own threads: a thread that changes it, or whose sums will be released,
holds a lock.

A non-finite example counts as 0: its factor is 0, and its rows are cleared, since 0 times NaN is NaN. Clearing takes a
copy of the layer's input or a synchronization with the device. A captured step (compiled.py) does neither. It records
the factors. If one of them is 0, the sums are discarded before anything is charged or released, and an ordinary step,
which clears, computes them again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clipwise.errors import StepError
from clipwise.gradients.outline import ACCUMULATE

Watcher = Callable[[Any, Tensor], None]  # a graph node, and the gradient of its output


class _Setting(NamedTuple):
    is_clipping: bool = True
    watcher: Watcher | None = None
    noted: list[Tensor] | None = None


_held = threading.RLock()
_now = _Setting()


@contextmanager
def _set(**values: Any) -> Iterator[None]:
    global _now
    with _held:
        before, _now = _now, _now._replace(**values)
        try:
            yield
        finally:
            _now = before


@contextmanager
def unclipped(watcher: Watcher | None = None) -> Iterator[None]:
    """Turn clipping off in this block. Results may expose single examples, and must not be released."""
    with _set(is_clipping=False, watcher=watcher):
        yield


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Report the gradients that reach clipped layers in this block, with clipping."""
    with _set(watcher=watcher):
        yield


@contextmanager
def noting() -> Iterator[list[Tensor]]:
    """Record factors instead of clearing non-finite examples in this block. Their factor is 0."""
    found: list[Tensor] = []
    with _set(noted=found):
        yield found


@contextmanager
def settled() -> Iterator[None]:
    """Keep other threads from changing the settings in this block, for a backward pass whose sums are released."""
    with _held:
        if not is_clipping():
            raise StepError(
                "Clipping is turned off here by layers.clipped.unclipped(), and a release must be clipped: call "
                "private.step and private.backward outside of that block."
            )
        yield


def is_clipping() -> bool:
    """Whether upstream gradients are clipped now."""
    return _now.is_clipping


def saw(node: Any, *gradients: Tensor) -> None:
    """Called by every clipped layer in a backward pass. Gradients of several outputs are concatenated, [B, ...]."""
    if _now.watcher is not None:
        one = len(gradients) == 1
        _now.watcher(node, gradients[0] if one else torch.cat([g.flatten(1) for g in gradients], 1))


def noted(factor_B: Tensor) -> bool:
    """Record the factors if requested. Returns whether rows with a factor of 0 (or False) may stay uncleared."""
    if _now.noted is None:
        return False
    _now.noted.append(factor_B.double())
    return True


def goes_on(ctx: Any) -> bool:
    """Whether the current backward pass needs the gradient of a node's first input.

    A batch is marked (validation/marked.py), so its gradient is available but seldom needed.
    """
    node = ctx.next_functions[0][0] if ctx.needs_input_grad[0] else None
    return node is not None and (node.name() == ACCUMULATE or torch._C._will_engine_execute_node(node))
