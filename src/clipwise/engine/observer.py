"""How an audit looks into a private run.

A run that is made inside `observing(observer)` asks the observer for its key, which units of a draw stay, which losses
to use and what to release. An observer sees sums without noise and may replace what is released, so nothing of an
observed run may be published: it keeps no ledger file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from torch import Tensor

from clipwise.noise.key import NoiseKey
from clipwise.sampling.base import Indices, Scheme

if TYPE_CHECKING:
    from clipwise.engine.context import StepContext
    from clipwise.sampling.loader import Piece

Sums = dict[str, Tensor]


class Observer:
    """Changes nothing. Audits override what they need."""

    def begins(self, run: StepContext) -> NoiseKey:
        """A run was made. Returns its key: an observed run never uses one of another run."""
        return NoiseKey.fresh()

    def kept(self, run: StepContext, drawn: Indices) -> Indices:
        """The units of a draw that stay: one that is left out is as if it had never been drawn."""
        return drawn

    def losses(self, run: StepContext, piece: Piece, losses: Tensor) -> Tensor:
        """The losses to go on with."""
        return losses

    def released(self, run: StepContext, sums: Sums, noised: Callable[[Sums], Sums]) -> Sums:
        """What is released for these sums: `noised(sums)` is what a run releases, and uses the sums up."""
        return noised(sums)


_observer: ContextVar[Observer | None] = ContextVar("clipwise.engine.observer", default=None)


def current() -> Observer | None:
    """The observer of runs that are made now."""
    return _observer.get()


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Every run that is made in this block is observed, for as long as it lasts."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


class ObservedScheme:
    """A scheme from whose draws an observer may leave units out."""

    has_random_size = True  # what is left out may be all of a batch

    def __init__(self, scheme: Scheme, kept: Callable[[Indices], Indices]) -> None:
        self._scheme, self._kept = scheme, kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheme, name)

    def __repr__(self) -> str:
        return repr(self._scheme)

    def draw(self, step_secret: bytes, epoch_secret: bytes, slot: int) -> Indices:
        """What the scheme draws, without the units that are left out."""
        return self._kept(self._scheme.draw(step_secret, epoch_secret, slot))
