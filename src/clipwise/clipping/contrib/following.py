"""Constants that follow typical norms: chosen by a rule at the start, and again every so many releases."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from clipwise.clipping.contrib.decay import Every, require_every
from clipwise.clipping.contrib.released import Estimated, Released
from clipwise.clipping.contrib.typical import OF, Measured, Question, Typical
from clipwise.clipping.public import Public, require_public
from clipwise.clipping.thresholds import Constants
from clipwise.errors import CheckpointError, ConfigurationError
from clipwise.validation.arguments import require_known

Source = Public | Released


@dataclass(frozen=True)
class Choice:
    """What a rule makes of typical norms: the arguments of `Constants`."""

    groups: dict[str, list[str]]
    norms: dict[str, float]
    scales: dict[str, float]


class Following(Constants):
    """A rule, and the typical norms that it goes by."""

    def __init__(
        self, typical: Typical, choose: Callable[[Mapping[str, float]], Choice], period: int | None
    ) -> None:
        self._typical, self._choose, self._period = typical, choose, period
        self._releases = 0
        choice = choose(typical.norms)
        super().__init__(choice.groups, choice.norms, choice.scales)
        self.lasts = math.inf if period is None else period

    def learn(self, means: Mapping[str, Tensor], noise: Mapping[str, float] | None = None) -> bool:
        """At the end of a period, choose again: at weights that have not yet taken in this release."""
        self._releases += 1
        self._typical.hear(means, noise or {})
        due = self._period is not None and self._releases % self._period == 0
        return due and self._typical.renew() and self._take_over()

    def _take_over(self) -> bool:
        choice = self._choose(self._typical.norms)
        self.groups, self.norms, self.scales = choice.groups, choice.norms, choice.scales
        return True

    def state_dict(self) -> dict[str, Any]:
        """The typical norms, from which all constants follow, and how many releases there were."""
        return {"releases": self._releases, **self._typical.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        releases = state.get("releases")
        if not isinstance(releases, int) or releases < 0:
            raise CheckpointError(
                "This state_dict of a private run is damaged: it does not say how many releases its constants have "
                "seen. Use the one saved before it."
            )
        self._typical.load_state_dict(state)
        self._releases = releases
        return self._take_over()


def require_source(given: object, who: str, every: Every) -> None:
    """Refuse norms from anything but public data and releases, and releases that are never looked at."""
    require_every(every, who)
    if not isinstance(given, Released):
        require_public(given, who, instead="; without public data, give Released()")
    elif every is None:
        raise ConfigurationError(
            f"{who}: every=None chooses once, at the start, and then nothing was released yet: give every='epoch' "
            "or a number of steps with Released()."
        )


def require_question(who: str, of: str, mini_set_size: int | None) -> None:
    """Refuse settings of how norms are measured."""
    require_known(f"{who}: of", of, OF)
    if mini_set_size is not None and (
        of != "mini-set"
        or isinstance(mini_set_size, bool)
        or not isinstance(mini_set_size, int)
        or mini_set_size < 1
    ):
        raise ConfigurationError(
            f"{who}: mini_set_size={mini_set_size!r} must be a whole number of at least 1, and goes with of='mini-set'."
        )


def typical_of(source: Source, question: Question) -> Typical:
    """The typical norms of a site, from public data or from releases."""
    if isinstance(source, Released):
        return Estimated(source, question)
    return Measured(source, question)
