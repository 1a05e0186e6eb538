"""A clipping norm with a decay schedule, and helpers for schedules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from clipwise.clipping.base import Site
from clipwise.clipping.thresholds import (
    Constants,
    Groups,
    NormRule,
    Policy,
    ScaledConstants,
    constants_for,
    require_max_norm,
)
from clipwise.errors import ConfigurationError
from clipwise.validation.arguments import number, whole, with_plain_numbers

_LEAST = 1e-6
Every = str | int | None  # "epoch", a number of steps, or never


def require_every(every: object, owner: str, never: bool = True) -> None:
    """Raise if `every` is neither "epoch" nor a number of steps, nor (if `never`) None."""
    is_count = isinstance(every, int) and not isinstance(every, bool) and every >= 1
    if not (is_count or every in (("epoch", None) if never else ("epoch",))):
        choices = "'epoch', a number of steps" + (", or None for once, at the start" if never else "")
        raise ConfigurationError(f"{owner}: every={every!r} is not known: use {choices}.")


def period_of(every: Every, site: Site) -> int | None:
    """The period in releases, with the epochs of the sampling scheme; None for never."""
    return site.scheme.steps_per_epoch if isinstance(every, str) else every


@dataclass(frozen=True)
class NormDecay(NormRule):
    """A `max_norm` that is multiplied by `factor` every epoch or every given number of steps.

        C_t = C_0 max(factor^floor(t / period), 1e-6),   t = releases so far

    Args:
        max_norm: C_0, a number, or one for each part.
        factor: above 0 and at most 1.
        every: "epoch" or a number of steps.

    Guarantee:
        That of the strategy with C_t. The schedule is fixed in advance and does not depend on data. The noise is scaled
        with C_t, so the noise multiplier is constant.
    """

    max_norm: float | Mapping[str, float]
    factor: float
    every: Every = "epoch"

    def __post_init__(self) -> None:
        with_plain_numbers(self)
        number("NormDecay: factor", self.factor, above=0, most=1)
        require_every(self.every, "NormDecay", never=False)
        require_max_norm(self.max_norm)

    def constants(self, parts: Groups | Policy, site: Site) -> Constants:
        return Decaying(self, constants_for(self.max_norm, parts, site), site)

    def describe(self) -> dict[str, Any]:
        norm = dict(self.max_norm) if isinstance(self.max_norm, Mapping) else self.max_norm
        return {"rule": "decay", "max_norm": norm, "factor": self.factor, "every": self.every}


class Decaying(ScaledConstants):
    """Other constants with decaying norms."""

    def __init__(self, decay: NormDecay, inner: Constants, site: Site) -> None:
        super().__init__(inner)
        self._share, self._releases = float(decay.factor), 0
        self._period = period_of(decay.every, site) or 1
        self.lasts = min(self._period, inner.lasts)

    def learn(self, means: Mapping[str, Tensor], noise: Mapping[str, float] | None = None) -> bool:
        """Update the inner constants, then the decay."""
        changed = self._inner.learn(means, noise)
        self._releases += 1
        return self._take_over() if changed or self._releases % self._period == 0 else False

    def factor(self, names: Sequence[str]) -> float:
        times = self._releases // self._period
        return max(math.exp(max(times * math.log(self._share), -700.0)), _LEAST)

    def state_dict(self) -> dict[str, Any]:
        return {**self._inner.state_dict(), "decay": {"releases": self._releases}}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        releases = whole("releases", state["decay"]["releases"])
        self._inner.load_state_dict(state)
        self._releases = releases
        return self._take_over()
