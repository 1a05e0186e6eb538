"""Clipping norms in proportion to the typical norms of the parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clipwise.clipping.base import Site
from clipwise.clipping.contrib.decay import Every
from clipwise.clipping.contrib.norm_policy import NormPolicy, Source
from clipwise.clipping.thresholds import Constants, Groups
from clipwise.deprecation import renamed_fields
from clipwise.validation.arguments import one_of

KINDS = ("enhanced", "zhang")


@renamed_fields(mini_set_size="microbatch_size")
@dataclass(frozen=True)
class Adaptive(NormPolicy):
    """Adaptive layerwise clipping: part h is clipped to C_h, which is proportional to its typical norm e_h.

        enhanced:  C_h = C e_h / max_j e_j,   C = max_norm, the bound of the part with the largest norm
        zhang:     C_h = max_norm e_h;        with max_norm = 1 the rule as published

    An e_h below a thousandth of the largest is raised to that value, so that no C_h is 0.

    Args:
        public: `PublicData` on which e_h is measured, or `ReleasedNorms()` (with "enhanced" only).
        kind: "enhanced" or "zhang".
        of: "example": e_h is the mean norm of an example's gradient; "microbatch": of the mean gradient of a
            microbatch, for `Batch`.
        every: "epoch" or a number of steps after which e_h is measured again at the current weights; None measures
            once, at the start.
        groups: the parts: "layer", "tensor", or lists of names, as for `parts` itself.
        microbatch_size: the number of examples per microbatch; by default the batch size of the public data.

    Guarantee:
        - That of the strategy, with sensitivity C_h or 2 C_h of part h. All parts are one Gaussian mechanism.
        - The C_h of a step are computed before it, from public data and released weights, or from releases only.
        - Assumption: data marked as public is public.
    """

    public: Source
    kind: str = "enhanced"
    of: str = "example"
    every: Every = "epoch"
    groups: Groups = "layer"
    microbatch_size: int | None = None

    def __post_init__(self) -> None:
        self.require_measurable()
        one_of("Adaptive: kind", self.kind, KINDS)
        if self.kind == "zhang":
            self.require_lengths("kind='zhang'", "use kind='enhanced'")

    def choice(self, e: Mapping[str, float], layers: Mapping[str, list[str]], max_norm: float, site: Site) -> Constants:
        """C_h for the typical norms of the parts."""
        unit = max(e.values()) if self.kind == "enhanced" else 1.0
        return Constants(dict(layers), {h: max_norm * (e[h] / unit) for h in layers}, {})

    def describe(self) -> dict[str, Any]:
        return {"rule": "adaptive", "kind": self.kind, **self.described()}
