"""Bounds of parts in proportion to their typical norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clipwise.clipping.constants import Constants
from clipwise.clipping.following import (
    Choice,
    Following,
    Source,
    require_question,
    require_source,
    typical_of,
)
from clipwise.clipping.parts import Groups, Policy, described_groups, group_parameters
from clipwise.clipping.released import Released
from clipwise.clipping.schedule import Every, period_of
from clipwise.clipping.strategy import Site
from clipwise.clipping.typical import Question
from clipwise.errors import ConfigurationError

KINDS = ("enhanced", "zhang")


@dataclass(frozen=True)
class Adaptive(Policy):
    """Adaptive layerwise clipping: part h is clipped at a C_h that goes with e_h, its typical norm.

        enhanced:  C_h = C e_h / max_j e_j,   C = max_norm, the bound of the part with the largest norm
        zhang:     C_h = max_norm e_h;        with max_norm = 1 the rule as published

    An e_h below a thousandth of the largest counts as that much, so that no C_h is 0.

    Args:
        public: `Public` data on which e_h is measured, or `Released()` (with "enhanced" only).
        kind: "enhanced" or "zhang".
        of: "example": e_h is the mean norm of an example's gradient; "mini-set": of the mean gradient of a
            mini-set, which suits a strategy that clips means.
        every: "epoch" or a number of steps after which e_h is measured again, at the weights of the moment;
            None measures once, at the start.
        groups: the parts: "layer", "tensor", or lists of names, as for `parts` itself.
        mini_set_size: examples of a mini-set; by default the batch size of the public data.

    Guarantee:
        That of the strategy, part by part: sensitivity C_h or 2 C_h. The C_h of a step are fixed before it, from
        public data and released weights, or from releases alone; they are public. All parts are one Gaussian event:
        the noise pays for the number of parts. Assumption: data marked as public is public.
    """

    public: Source
    kind: str = "enhanced"
    of: str = "example"
    every: Every = "epoch"
    groups: Groups = "layer"
    mini_set_size: int | None = None

    def __post_init__(self) -> None:
        require_source(self.public, "Adaptive", self.every)
        require_question("Adaptive", self.of, self.mini_set_size)
        if self.kind not in KINDS:
            raise ConfigurationError(f"Adaptive: kind={self.kind!r} is not known: use 'enhanced' or 'zhang'.")
        if isinstance(self.public, Released) and self.kind == "zhang":
            raise ConfigurationError(
                "Adaptive: kind='zhang' needs the norms themselves, and Released() knows their ratios only: use "
                "kind='enhanced', or public data."
            )

    def constants(self, max_norm: float, site: Site) -> Constants:
        """For one model, with the norms of its weights as they are now."""
        groups = group_parameters(self.groups, site.parameters)
        typical = typical_of(self.public, Question(site, groups, self.of, self.mini_set_size))

        def choose(e: Mapping[str, float]) -> Choice:
            unit = max(e.values()) if self.kind == "enhanced" else 1.0
            return Choice(groups, {h: max_norm * (e[h] / unit) for h in groups}, {})

        return Following(typical, choose, period_of(self.every, site))

    def describe(self) -> dict[str, Any]:
        """The rule in plain types."""
        return {
            "rule": "adaptive",
            "kind": self.kind,
            "norms from": self.public.describe(),
            "of": self.of,
            "mini_set_size": self.mini_set_size,
            "every": self.every,
            "groups": described_groups(self.groups),
        }
