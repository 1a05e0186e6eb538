"""How often something is done, counted in releases."""

from __future__ import annotations

from clipwise.clipping.base import Site
from clipwise.errors import ConfigurationError

Every = str | int | None


def require_every(every: object, who: str, never: bool = True) -> None:
    """Refuse what is neither "epoch" nor a number of steps, nor (where that makes sense) None for never."""
    number = isinstance(every, int) and not isinstance(every, bool) and every >= 1
    if not (number or (isinstance(every, str) and every == "epoch") or (every is None and never)):
        choices = "'epoch', a number of steps" + (", or None for once, at the start" if never else "")
        raise ConfigurationError(f"{who}: every={every!r} is not known: use {choices}.")


def period_of(every: Every, site: Site) -> int | None:
    """The number of releases between two times. An epoch is that of the sampling scheme; None is never."""
    return site.scheme.steps_per_epoch if isinstance(every, str) else every
