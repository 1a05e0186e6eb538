"""Parts of layers with similar gradient norms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from clipwise.clipping.base import Site
from clipwise.clipping.contrib.decay import Every
from clipwise.clipping.contrib.norm_policy import NormPolicy, Source
from clipwise.clipping.thresholds import Constants, Groups
from clipwise.deprecation import renamed_fields
from clipwise.validation.arguments import whole


@renamed_fields(mini_set_size="microbatch_size")
@dataclass(frozen=True)
class ByNorm(NormPolicy):
    """Groups of layers with similar typical norms, the smallest first.

    The layers, sorted by e_h, are cut into `groups` runs that minimize the variation of log e_h within them (least
    squares, solved exactly). With E_k^2 = sum of e_h^2 over group k, its bound is

        C_k = C E_k / sqrt(sum_j E_j^2),   C = max_norm, the total: sum_k C_k^2 = C^2

    Args:
        public: `PublicData` on which e_h is measured, or `ReleasedNorms()`, which needs `every`.
        groups: the number of groups; at most the number of layers is used.
        among: what is grouped: "layer", "tensor", or lists of names.
        of, microbatch_size: as in `Adaptive`.
        every: "epoch" or a number of steps after which norms are measured and layers grouped again; by default
            once, at the start.

    Guarantee:
        - That of the strategy, with sensitivity C_k or 2 C_k of group k.
        - Groups and bounds of a step are computed before it, from public data and released weights, or from releases
          only.
        - Assumption: data marked as public is public.
    """

    public: Source
    groups: int = 4
    among: Groups = "layer"
    grouped_by: ClassVar[str] = "among"
    of: str = "example"
    every: Every = None
    microbatch_size: int | None = None

    def __post_init__(self) -> None:
        self.require_measurable()
        whole("ByNorm: groups (`among` selects what is grouped)", self.groups, least=1)

    def choice(self, e: Mapping[str, float], layers: Mapping[str, list[str]], max_norm: float, site: Site) -> Constants:
        """The groups and their C_k."""
        ordered = sorted(layers, key=lambda h: e[h])  # stable: layers of one norm stay in the model's order
        cuts = best_cuts([math.log(e[h]) for h in ordered], self.groups)
        runs = [ordered[a:b] for a, b in pairwise(cuts)]
        lengths = [math.hypot(*(e[h] for h in run)) for run in runs]
        total = math.hypot(*lengths)
        return Constants(
            {f"group {k}": [n for h in run for n in layers[h]] for k, run in enumerate(runs)},
            {f"group {k}": max_norm * (length / total) for k, length in enumerate(lengths)},
            {},
        )

    def describe(self) -> dict[str, Any]:
        return {"rule": "by norm", "groups": self.groups, **self.described()}


def best_cuts(values: Sequence[float], runs: int) -> list[int]:
    """0 = c_0 < c_1 < ... < c_K = n: the runs of sorted values with the least squared deviations from their means.

    least[b] is the least sum over values[:b] for a given number of runs; for one more run,
    least'[b] = min over a of least[a] + deviations(a, b).
    """
    n = len(values)

    def deviations(a: int, b: int) -> float:
        mean = math.fsum(values[a:b]) / (b - a)
        return math.fsum((v - mean) ** 2 for v in values[a:b])

    cost = {(a, b): deviations(a, b) for b in range(1, n + 1) for a in range(b)}
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for _ in range(min(runs, n)):
        best = {
            b: min((least + cost[a, b], [*cuts, b]) for a, (least, cuts) in best.items() if a < b)
            for b in range(1, n + 1)
            if any(a < b for a in best)
        }
    return best[n][1]
