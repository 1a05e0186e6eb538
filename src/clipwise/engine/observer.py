"""The seam through which an audit looks into a private run.

A run that is made inside `watching(watch)` asks the watch for its key, who of a draw stays, which losses to go on
with and what to release. A watch sees sums without noise and may put other values in the place of what
is released, so nothing of a watched run may be published: it keeps no ledger file and says so to nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from clipwise.noise.gaussian import NoiseKey
from clipwise.sampling.base import Indices, Scheme

if TYPE_CHECKING:
    from clipwise.engine.private import Private
    from clipwise.sampling.loader import Piece

Sums = dict[str, Tensor]


class Watch:
    """Looks on and changes nothing. Audits override what they need."""

    def begins(self, private: Private) -> NoiseKey:
        """A run was made. What it is to take as its key: a watched run never touches one that is in use."""
        return NoiseKey.fresh()

    def kept(self, private: Private, drawn: Indices) -> Indices:
        """The units of a draw that stay: one that is left out is as if it had never been drawn."""
        return drawn

    def losses(self, private: Private, piece: Piece, losses: Tensor) -> Tensor:
        """The losses to go on with."""
        return losses

    def released(self, private: Private, sums: Sums, noised: Callable[[Sums], Sums]) -> Sums:
        """What is released for these sums: `noised(sums)` is what a run releases, and uses the sums up."""
        return noised(sums)


_watch: ContextVar[Watch | None] = ContextVar("clipwise.engine.observer", default=None)


def current() -> Watch | None:
    """Who watches the runs that are made now."""
    return _watch.get()


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Every run that is made in this block is watched, for as long as it lasts."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


def watched(scheme: Scheme, kept: Callable[[Indices], Indices]) -> Scheme:
    """The scheme, with every draw passing by `kept`."""
    return cast(Scheme, _WatchedScheme(scheme, kept))


class _WatchedScheme:
    """A scheme whose draws pass by a watch, which may leave units out."""

    has_random_size = True  # what is left out may be all of a batch

    def __init__(self, scheme: Scheme, kept: Callable[[Indices], Indices]) -> None:
        self._scheme, self._kept = scheme, kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheme, name)

    def __repr__(self) -> str:
        return repr(self._scheme)

    def draw(self, step_secret: bytes, epoch_secret: bytes, slot: int) -> Indices:
        """What the scheme draws, without those who are left out."""
        return self._kept(self._scheme.draw(step_secret, epoch_secret, slot))
