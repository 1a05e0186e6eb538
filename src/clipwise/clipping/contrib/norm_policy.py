"""Policies that follow typical norms: what `Adaptive`, `Multipliers` and `ByNorm` share."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from clipwise.clipping.base import Site, damaged
from clipwise.clipping.contrib.decay import Every, period_of, require_every
from clipwise.clipping.contrib.released import Estimated, Released
from clipwise.clipping.contrib.typical import OF, Measured, Question, Typical
from clipwise.clipping.grouping import Groups, Policy, described_groups, group_parameters
from clipwise.clipping.public import Public, require_public
from clipwise.clipping.thresholds import Constants
from clipwise.errors import ConfigurationError
from clipwise.validation.arguments import one_of, with_plain_numbers

Source = Public | Released


class NormPolicy(Policy):
    """A rule that makes constants of e_h, the typical norm of each layer h.

    Attributes:
        public: where e_h comes from.
        of, mini_set_size: whose norms they are.
        every: when they are measured again.
        grouped_by: the argument that names the groups with a typical norm of their own.
    """

    public: Source
    of: str
    every: Every
    mini_set_size: int | None
    grouped_by: ClassVar[str] = "groups"

    @abstractmethod
    def choice(
        self, e: Mapping[str, float], layers: Mapping[str, list[str]], max_norm: float, site: Site
    ) -> Constants:
        """The constants for these typical norms. `layers` has the parameters of each h."""

    def constants(self, max_norm: float, site: Site) -> Constants:
        """For one model, with the norms of its weights as they are now."""
        who = f"{type(self).__name__}: {self.grouped_by}"
        layers = group_parameters(self._measured(), site.parameters, who)
        question = Question(site, layers, self.of, self.mini_set_size)
        typical = (
            Estimated(self.public, question)
            if isinstance(self.public, Released)
            else Measured(self.public, question)
        )
        return Following(
            typical, lambda e: self.choice(e, layers, max_norm, site), period_of(self.every, site)
        )

    def public_data(self) -> tuple[Public, ...]:
        return (self.public,) if isinstance(self.public, Public) else ()

    def require_measurable(self) -> None:
        """For the beginning of `__post_init__`: refuse a source or settings that give no norms."""
        with_plain_numbers(self)
        who, mini_set_size = type(self).__name__, self.mini_set_size
        require_every(self.every, who)
        if not isinstance(self.public, Released):
            require_public(self.public, who, instead="; without public data, give Released()")
        elif self.every is None:
            raise ConfigurationError(
                f"{who}: every=None chooses once, at the start, and then nothing was released yet: give every='epoch' "
                "or a number of steps with Released()."
            )
        one_of(f"{who}: of", self.of, OF)
        is_count = (
            isinstance(mini_set_size, int) and not isinstance(mini_set_size, bool) and mini_set_size >= 1
        )
        if mini_set_size is not None and not (is_count and self.of == "mini-set"):
            raise ConfigurationError(
                f"{who}: mini_set_size={mini_set_size!r} must be a whole number of at least 1, and goes with "
                "of='mini-set'."
            )

    def require_lengths(self, why: str, instead: str) -> None:
        """Refuse releases as the source, where ratios of norms are not enough."""
        if isinstance(self.public, Released):
            raise ConfigurationError(
                f"{type(self).__name__}: {why} needs the norms themselves, and Released() knows their ratios only: "
                f"{instead}, or give public data."
            )

    def described(self) -> dict[str, Any]:
        """Where e_h comes from, in plain types."""
        return {
            "norms from": self.public.describe(),
            "of": self.of,
            "mini_set_size": self.mini_set_size,
            "every": self.every,
            self.grouped_by: described_groups(self._measured()),
        }

    def _measured(self) -> Groups:
        groups: Groups = getattr(self, self.grouped_by)
        return groups


class Following(Constants):
    """A rule, and the typical norms that it goes by."""

    def __init__(
        self, typical: Typical, choose: Callable[[Mapping[str, float]], Constants], period: int | None
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
            raise damaged("it does not say how many releases its constants have seen")
        self._typical.load_state_dict(state)
        self._releases = releases
        return self._take_over()
