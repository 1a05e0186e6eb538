"""Policies that go by typical norms: what `Adaptive`, `Multipliers` and `ByNorm` share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from clipwise.clipping.base import Site
from clipwise.clipping.contrib.decay import Every, period_of
from clipwise.clipping.contrib.following import (
    Choice,
    Following,
    Source,
    require_question,
    require_source,
    typical_of,
)
from clipwise.clipping.contrib.released import Released
from clipwise.clipping.contrib.typical import Question
from clipwise.clipping.grouping import Groups, Policy, group_parameters
from clipwise.clipping.public import Public
from clipwise.clipping.thresholds import Constants
from clipwise.errors import ConfigurationError


class NormPolicy(Policy):
    """A rule that makes constants of e_h, the typical norm of each layer h.

    Attributes:
        public: where e_h comes from.
        of, mini_set_size: whose norms they are.
        every: when they are measured again.
        grouped_by: the argument that says what has a typical norm of its own.
    """

    public: Source
    of: str
    every: Every
    mini_set_size: int | None
    grouped_by: ClassVar[str] = "groups"

    @abstractmethod
    def choice(
        self, e: Mapping[str, float], layers: Mapping[str, list[str]], max_norm: float, site: Site
    ) -> Choice:
        """The constants for these typical norms. `layers` has the parameters of each h."""

    @abstractmethod
    def measured(self) -> Groups:
        """What has a typical norm of its own: "layer", "tensor", or lists of names."""

    def constants(self, max_norm: float, site: Site) -> Constants:
        """For one model, with the norms of its weights as they are now."""
        layers = group_parameters(
            self.measured(), site.parameters, f"{type(self).__name__}: {self.grouped_by}"
        )
        typical = typical_of(self.public, Question(site, layers, self.of, self.mini_set_size))
        return Following(
            typical, lambda e: self.choice(e, layers, max_norm, site), period_of(self.every, site)
        )

    def public_data(self) -> tuple[Public, ...]:
        return (self.public,) if isinstance(self.public, Public) else ()

    def require_measurable(self) -> None:
        """Refuse a source or a question that gives no norms."""
        require_source(self.public, type(self).__name__, self.every)
        require_question(type(self).__name__, self.of, self.mini_set_size)

    def require_lengths(self, why: str, instead: str) -> None:
        """Refuse releases as the source, where ratios of norms are not enough."""
        if isinstance(self.public, Released):
            raise ConfigurationError(
                f"{type(self).__name__}: {why} needs the norms themselves, and Released() knows their ratios only: "
                f"{instead}, or give public data."
            )

    def describe_norms(self) -> dict[str, Any]:
        """Where e_h comes from, in plain types."""
        return {
            "norms from": self.public.describe(),
            "of": self.of,
            "mini_set_size": self.mini_set_size,
            "every": self.every,
        }
