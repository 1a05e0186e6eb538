"""The common base of `Adaptive`, `Multipliers` and `ByNorm`: policies based on typical norms."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from clipwise.clipping.base import Site
from clipwise.clipping.contrib.decay import Every, period_of, require_every, saved_releases
from clipwise.clipping.contrib.typical import OF, Estimated, Measured, Question, ReleasedNorms, Typical
from clipwise.clipping.public import PublicData, require_public
from clipwise.clipping.thresholds import Constants, Groups, Policy, described_groups, group_parameters
from clipwise.errors import ConfigurationError
from clipwise.validation.arguments import one_of, whole, with_plain_numbers

Source = PublicData | ReleasedNorms


class NormPolicy(Policy):
    """A rule that computes constants from e_h, the typical norm of each layer h.

    Attributes:
        public: the source of e_h.
        of, microbatch_size: norms of examples or of microbatches.
        every: the period of the measurements.
        grouped_by: the argument with the groups h.
    """

    public: Source
    of: str
    every: Every
    microbatch_size: int | None
    grouped_by: ClassVar[str] = "groups"

    @abstractmethod
    def choice(self, e: Mapping[str, float], layers: Mapping[str, list[str]], max_norm: float, site: Site) -> Constants:
        """The constants for typical norms `e`. `layers` has the parameters of each h."""

    def constants(self, max_norm: float, site: Site) -> Constants:
        """The constants for one model, with norms measured at its current weights."""
        who = f"{type(self).__name__}: {self.grouped_by}"
        layers = group_parameters(self._measured(), site.parameters, who)
        question = Question(site, layers, self.of, self.microbatch_size)
        public = self.public
        typical = Estimated(public, question) if isinstance(public, ReleasedNorms) else Measured(public, question)
        return Following(typical, lambda e: self.choice(e, layers, max_norm, site), period_of(self.every, site))

    def public_data(self) -> tuple[PublicData, ...]:
        return (self.public,) if isinstance(self.public, PublicData) else ()

    def require_measurable(self) -> None:
        """Raise if the source or the settings give no norms; called first in `__post_init__`."""
        with_plain_numbers(self)
        who, microbatch_size = type(self).__name__, self.microbatch_size
        require_every(self.every, who)
        if not isinstance(self.public, ReleasedNorms):
            require_public(self.public, who, instead="; without public data, pass ReleasedNorms()")
        elif self.every is None:
            raise ConfigurationError(
                f"{who}: every=None measures once, at the start, before the first release: pass every='epoch' or a "
                "number of steps with ReleasedNorms()."
            )
        object.__setattr__(self, "of", one_of(f"{who}: of", self.of, OF))
        if microbatch_size is not None:
            whole(f"{who}: microbatch_size", microbatch_size, least=1)
            if self.of != "microbatch":
                raise ConfigurationError(f"{who}: microbatch_size requires of='microbatch'.")

    def require_lengths(self, why: str, instead: str) -> None:
        """Raise if the source is `ReleasedNorms`, which gives only ratios of norms."""
        if isinstance(self.public, ReleasedNorms):
            raise ConfigurationError(
                f"{type(self).__name__}: {why} requires norms, but ReleasedNorms() estimates only their ratios: "
                f"{instead}, or pass public data."
            )

    def described(self) -> dict[str, Any]:
        """The source of e_h, in JSON types."""
        return {
            "norms from": self.public.describe(),
            "of": self.of,
            "microbatch_size": self.microbatch_size,
            "every": self.every,
            self.grouped_by: described_groups(self._measured()),
        }

    def _measured(self) -> Groups:
        groups: Groups = getattr(self, self.grouped_by)
        return groups


class Following(Constants):
    """Constants from a rule and from typical norms."""

    def __init__(
        self, typical: Typical, choose: Callable[[Mapping[str, float]], Constants], period: int | None
    ) -> None:
        self._typical, self._choose, self._period = typical, choose, period
        self._releases = 0
        choice = choose(typical.norms)
        super().__init__(choice.groups, choice.norms, choice.scales)
        self.lasts = math.inf if period is None else period

    def learn(self, means: Mapping[str, Tensor], noise: Mapping[str, float] | None = None) -> bool:
        """At the end of a period, measure and choose again, at the weights before this update."""
        self._releases += 1
        self._typical.observe(means, noise or {})
        due = self._period is not None and self._releases % self._period == 0
        return due and self._typical.renew() and self._take_over()

    def _take_over(self) -> bool:
        choice = self._choose(self._typical.norms)
        self.groups, self.norms, self.scales = choice.groups, choice.norms, choice.scales
        return True

    def state_dict(self) -> dict[str, Any]:
        """The typical norms, which determine all constants, and the number of releases."""
        return {"releases": self._releases, **self._typical.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        releases = saved_releases(state, "constants")
        self._typical.load_state_dict(state)
        self._releases = releases
        return self._take_over()
