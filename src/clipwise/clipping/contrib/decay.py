"""A bound that shrinks by a schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from clipwise.clipping.base import Site
from clipwise.clipping.constants import Constants
from clipwise.clipping.schedule import Every, period_of, require_every
from clipwise.errors import CheckpointError, ConfigurationError
from clipwise.validation.arguments import with_plain_numbers

_LEAST = 1e-6


@dataclass(frozen=True)
class Decay:
    """A `max_norm` that is multiplied by `factor` every epoch, or every so many steps.

        C_t = C_0 max(factor^floor(t / period), 1e-6),   t = releases so far

    Args:
        max_norm: C_0, a number, or one for each part.
        factor: above 0 and at most 1.
        every: "epoch" or a number of steps.

    Guarantee:
        That of the strategy with C_t. The schedule is fixed beforehand and looks at no data. The noise follows the
        bound, so the noise multiplier and with it the event of a step stay what they were.
    """

    max_norm: float | Mapping[str, float]
    factor: float
    every: Every = "epoch"

    def __post_init__(self) -> None:
        with_plain_numbers(self)
        number = isinstance(self.factor, (int, float)) and not isinstance(self.factor, bool)
        if not (number and 0 < self.factor <= 1):
            raise ConfigurationError(
                f"Decay: factor must be a number above 0 and at most 1, not {self.factor!r}."
            )
        require_every(self.every, "Decay", never=False)

    def describe(self) -> dict[str, Any]:
        """The schedule in plain types."""
        norm = dict(self.max_norm) if isinstance(self.max_norm, Mapping) else self.max_norm
        return {"rule": "decay", "max_norm": norm, "factor": self.factor, "every": self.every}


class Decaying(Constants):
    """Other constants, whose norms shrink."""

    def __init__(self, decay: Decay, inner: Constants, site: Site) -> None:
        self._inner, self._factor = inner, float(decay.factor)
        self._period = period_of(decay.every, site) or 1
        self._releases = 0
        self.lasts = min(self._period, inner.lasts)
        self.alone, self.share = inner.alone, inner.share
        super().__init__(inner.groups, inner.norms, inner.scales)
        self.bounds = inner.bounds

    def chosen(self, secret: bytes, vectors: int) -> dict[str, Tensor]:
        return self._inner.chosen(secret, vectors)

    def counts(
        self, norms: Mapping[str, Tensor], muted_B: Tensor, real_B: Tensor | None = None
    ) -> dict[str, Tensor]:
        return self._inner.counts(norms, muted_B, real_B)

    def learn(self, means: Mapping[str, Tensor], noise: Mapping[str, float] | None = None) -> bool:
        """The inner constants first: they adapt to what was released."""
        changed = self._inner.learn(means, noise)
        self._releases += 1
        return self._take_over() if changed or self._releases % self._period == 0 else False

    def _take_over(self) -> bool:
        times = self._releases // self._period
        share = max(math.exp(max(times * math.log(self._factor), -700.0)), _LEAST)
        self.groups, self.scales = self._inner.groups, dict(self._inner.scales)
        self.norms = {part: C * share for part, C in self._inner.norms.items()}
        return True

    def state_dict(self) -> dict[str, Any]:
        return {**self._inner.state_dict(), "decay": {"releases": self._releases}}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        releases = state.get("decay", {}).get("releases")
        if not isinstance(releases, int) or releases < 0:
            raise CheckpointError(
                "This state_dict of a private run is damaged: it does not say how many releases its bound has decayed "
                "over. Use the one saved before it."
            )
        self._inner.load_state_dict(state)
        self._releases = releases
        return self._take_over()
