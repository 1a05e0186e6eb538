"""Compare two methods on the same seeds by a Wilcoxon signed-rank test."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import wilcoxon

LEVEL = 0.05
FEWEST = 6  # pairs: with fewer, the p-value of a signed-rank test is never below the level


@dataclass(frozen=True)
class Comparison:
    """The mean difference of the first to the second, and the p-value of a Wilcoxon signed-rank test."""

    difference: float
    p: float
    pairs: int

    @property
    def is_decided(self) -> bool:
        """Whether the difference is significant at 5%."""
        return self.p < LEVEL

    @property
    def verdict(self) -> int:
        """1 if the first is better, -1 if the second is, 0 if undecided."""
        return int(math.copysign(1, self.difference)) if self.is_decided and self.difference else 0


def compare(first: Sequence[float], second: Sequence[float]) -> Comparison | None:
    """Compare accuracies with the same seeds, in order; None without a pair."""
    if not first or len(first) != len(second):
        return None
    differences = [a - b for a, b in zip(first, second, strict=True)]
    mean = statistics.fmean(differences)
    if not any(differences):
        return Comparison(0.0, 1.0, len(differences))
    # Zeros are split between the ranks of both signs: without them the test would be too optimistic.
    p = float(wilcoxon(differences, zero_method="zsplit").pvalue)
    return Comparison(mean, p, len(differences))
