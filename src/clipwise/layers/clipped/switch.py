"""Whether upstream gradients are clipped in a backward pass, and who looks at them; whether examples are cleared.

They are, unless somebody examines a graph: a probe (gradients/layout.py) needs a backward pass that is linear in the
weights of the losses, and a clip is not. There is one switch for all threads, since torch runs backward passes on
threads of its own; so a thread that turns it, and one whose sums will be released, hold a lock.

An example that is not finite counts as 0: its factor is 0, and its rows are cleared, for 0 times NaN is NaN. To clear
them takes a copy of the layer's input, or a wait for the device to say that there is nothing to clear. A step that is
captured (compiled.py) does neither. It notes the factors, and if one of them is 0, what was summed is thrown away
before anything is charged or released, and an ordinary step, which clears, sums again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from clipwise.errors import StepError
from clipwise.gradients.operations import ACCUMULATE

Comparison = Callable[[str, Tensor], None]  # of what, and norm / bound of each example
Watcher = Callable[[Any, Tensor], None]  # a node of the graph, and the gradient of its output


@dataclass(frozen=True)
class _Setting:
    is_clipping: bool = True
    watcher: Watcher | None = None
    comparison: Comparison | None = None
    noted: list[Tensor] | None = None


_held = threading.RLock()
_now = _Setting()


@contextmanager
def _set(**values: Any) -> Iterator[None]:
    global _now
    with _held:
        before, _now = _now, replace(_now, **values)
        try:
            yield
        finally:
            _now = before


@contextmanager
def unclipped(watcher: Watcher | None = None) -> Iterator[None]:
    """In this block backward passes do not clip. Their results are of single examples, and must not be released."""
    with _set(is_clipping=False, watcher=watcher):
        yield


@contextmanager
def measured(watcher: Watcher, comparison: Comparison) -> Iterator[None]:
    """In this block everything that is compared with a bound is reported, after the node to which it belongs."""
    with _set(watcher=watcher, comparison=comparison):
        yield


@contextmanager
def noting() -> Iterator[list[Tensor]]:
    """In this block examples that do not count are not cleared: what they are scaled by, 0, is noted in the list."""
    found: list[Tensor] = []
    with _set(noted=found):
        yield found


@contextmanager
def settled() -> Iterator[None]:
    """In this block no other thread turns the switch: for a backward pass whose sums will be released."""
    with _held:
        if not is_clipping():
            raise StepError(
                "Clips are suspended here by layers.clipped.unclipped(), and what is released must be clipped: call "
                "private.step and private.backward outside of that block."
            )
        yield


def is_clipping() -> bool:
    """Whether upstream gradients are clipped now."""
    return _now.is_clipping


def saw(node: Any, *gradients: Tensor) -> None:
    """Called by every clipped layer in a backward pass. Those of several outputs are shown side by side, [B, ...]."""
    if _now.watcher is not None:
        one = len(gradients) == 1
        _now.watcher(node, gradients[0] if one else torch.cat([g.flatten(1) for g in gradients], 1))


def is_measured() -> bool:
    """Whether somebody is told what is compared: kernels that keep it to themselves will not do then."""
    return _now.comparison is not None


def compared(of: str, norm_B: Tensor, bound: float) -> None:
    """Called wherever norms of upstream gradients are held against their bound."""
    if _now.comparison is not None:
        _now.comparison(of, norm_B / bound)


def noted(factor_B: Tensor) -> bool:
    """Whether somebody sees to examples with a factor of 0 (or False), so that their rows may stay as they are."""
    if _now.noted is None:
        return False
    _now.noted.append(factor_B.double())
    return True


def goes_on(ctx: Any) -> bool:
    """Whether the backward pass that runs asks a node for the gradient of its first input.

    A batch is marked (validation/marked.py), so its gradient could be asked for, and hardly ever is.
    """
    node = ctx.next_functions[0][0] if ctx.needs_input_grad[0] else None
    return node is not None and (node.name() == ACCUMULATE or torch._C._will_engine_execute_node(node))
