"""Observers: the interface by which an audit inspects a private run.

A run made inside `observing(observer)` lets the observer choose its key, remove units from a draw, replace the losses
and replace the released sums. An observer sees sums without noise, so nothing of an observed run may be published: it
keeps no ledger file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from torch import Tensor

from clipwise.noise.key import NoiseKey
from clipwise.sampling.base import Indices

if TYPE_CHECKING:
    from clipwise.engine.context import StepContext
    from clipwise.sampling.loader import Piece

Sums = dict[str, Tensor]


class Observer:
    """An observer that changes nothing. Audits override methods."""

    def begins(self, run: StepContext) -> NoiseKey:
        """Called when a run is made. Returns its key, which no other run may use."""
        return NoiseKey.fresh()

    def kept(self, run: StepContext, drawn: Indices) -> Indices:
        """The units of a draw to keep. The others count as not drawn."""
        return drawn

    def losses(self, run: StepContext, piece: Piece, losses: Tensor) -> Tensor:
        """The losses to use."""
        return losses

    def released(self, run: StepContext, sums: Sums, noised: Callable[[Sums], Sums]) -> Sums:
        """The values to release. `noised(sums)` is what a run releases; it overwrites the sums."""
        return noised(sums)


_observer: ContextVar[Observer | None] = ContextVar("clipwise.engine.observer", default=None)


def current() -> Observer | None:
    """The observer of runs made in this context."""
    return _observer.get()


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Observe every run made in this block, also after the block ends."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)
