"""Noised counts of rows: what a recipe may learn from private rows before it trains on them.

Adjacency is zero-out of one row. A row adds 1 to at most one bin of each histogram, and to the count of at most one
string of each column of strings. All of it is one Gaussian mechanism:

    released = round(count + N(0, s_k^2)),   s_k = z sqrt(W / w_k),   W = w_1 + ... + w_K

for K names with weights w_k, 1 by default. Its noise multiplier is (sum_k 1 / s_k^2)^(-1/2) = z; with equal weights the
L2 sensitivity is sqrt(K). Counts are whole numbers, and so are the released values: rounding to whole numbers commutes
with the addition of a count, so the low bits of a floating-point sum show nothing.

Strings of unknown domain. A list of strings is itself private. Only strings with a noised count of at least T are
shown,

    T = ceil(3/2 + s_k Phi^-1(1 - delta / m))    for m columns of strings.

If a row is the only one with a string, the noised count is at least T with probability at most delta / m: rounding adds
at most 1/2 to 1 + N. So with probability at most delta the release shows a string that only one row has. Otherwise it
is the Gaussian mechanism on the strings of the other rows. `Event.excess` has delta, and accountants add it
(accounting/truncation.py has the proof). Strings are sorted, so the order of rows does not matter. Strings of a public
list of candidates need no threshold: their noised counts are released whether rows have them or not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special

from clipwise.accounting.gaussian import largest_mu
from clipwise.errors import ConfigurationError
from clipwise.noise.gaussian import gaussian
from clipwise.noise.key import NoiseKey
from clipwise.privacy import Adjacency, Event, Sampling, Unit
from clipwise.validation.arguments import number

# The share of delta for `NoisedCounts.delta`. A tenth would lower thresholds by a quarter only. This small one also
# fits, up to ten times, the share of delta that totals over several runs keep for rare events (accounting/filter.py).
STRING_SHARE = 1e-4
# Standard deviations are rounded up by more than their rounding error, and quantiles by more than that of `ndtri`.
_SLACK = 1 + 1e-9


@dataclass(frozen=True)
class ReleasedCounts:
    """Noised counts, which anyone may see. They may be negative.

    Attributes:
        histograms: for each name the noised count of every bin.
        strings: for each name the strings that are shown, sorted, with their noised counts.
        std: for each name the standard deviation of the noise.
        thresholds: for each name of strings the least noised count that is shown.
        candidates: for each name of strings the noised count of every public candidate.
    """

    histograms: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    strings: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    std: Mapping[str, float] = field(default_factory=dict)
    thresholds: Mapping[str, int] = field(default_factory=dict)
    candidates: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


class NoisedCounts:
    """Noised histograms of rows: one Gaussian mechanism, charged to the ledger before any noise is drawn.

    Args:
        noise_multiplier: z of the joint mechanism. 0 adds no noise, and epsilon is then infinite.
        charge: counts an event in the ledger; if it raises, nothing is released.
        delta: the probability with which a string that only one row has may be shown; needed for strings.
        key: the secret of the noise; by default from the operating system.
    """

    def __init__(
        self,
        noise_multiplier: float,
        charge: Callable[[Event], None],
        *,
        delta: float = 0.0,
        key: NoiseKey | None = None,
    ) -> None:
        self._z = number("noise_multiplier", noise_multiplier, least=0)
        self._charge, self._key = charge, key
        self._delta = number("delta", delta, least=0, below=1)
        self._used = False

    @property
    def delta(self) -> float:
        """The probability with which a string that only one row has may be shown."""
        return self._delta

    def event(self, strings: bool) -> Event:
        """What a release charges, with or without strings."""
        excess = self._delta if strings else 0.0
        return Event(Sampling.FULL, Adjacency.ZERO_OUT, Unit.RECORD, self._z, 1.0, excess=excess)

    def std_of(self, names: Sequence[str], weights: Mapping[str, float] | None = None) -> dict[str, float]:
        """The standard deviation of the noise of each name, if all of them are released together. It is public."""
        return _stds(self._z, names, weights or {})

    def release(
        self,
        histograms: Mapping[str, tuple[np.ndarray, int]],
        strings: Mapping[str, Sequence[str | None]] | None = None,
        weights: Mapping[str, float] | None = None,
        candidates: Mapping[str, Sequence[str]] | None = None,
    ) -> ReleasedCounts:
        """Charge and release all counts. Possible once, because a second release would use the same budget again.

        Args:
            histograms: for each name the bin of every row (-1: none) and the number of bins.
            strings: for each name the string of every row (None: none), of unknown domain.
            weights: the share of the budget that a name gets, relative to 1 for the others. Like the names and the
                numbers of bins, they must not depend on the rows.
            candidates: for names of strings, a public list of strings whose counts are released in any case.
        """
        strings = strings or {}
        self._require_possible(histograms, strings)
        counts = {name: _counts(name, *given) for name, given in histograms.items()}
        public = {name: sorted(set((candidates or {}).get(name, ()))) for name in strings}
        totals = {name: Counter(v for v in given if v is not None) for name, given in strings.items()}
        std = self.std_of([*histograms, *strings], weights)
        thresholds = {name: threshold(std[name], self._delta / len(strings)) for name in strings}
        self._used = True
        self._charge(self.event(bool(strings)))

        key = NoiseKey.fresh() if self._key is None else self._key
        noised = {name: _noised(count_K, std[name], key, f"counts/{name}") for name, count_K in counts.items()}
        shown, known = {}, {}
        for name, total in totals.items():
            known[name] = _noised_strings(total, public[name], std[name], key, f"candidates/{name}")
            others = _noised_strings(total, sorted(set(total) - set(public[name])), std[name], key, f"strings/{name}")
            shown[name] = {text: value for text, value in others.items() if value >= thresholds[name]}
        key.advance()
        return ReleasedCounts(noised, shown, std, thresholds, known)

    def _require_possible(self, histograms: Mapping[str, object], strings: Mapping[str, object]) -> None:
        if self._used:
            raise ConfigurationError(
                "NoisedCounts.release was called before: make a new NoisedCounts, which is charged as well."
            )
        if not histograms and not strings:
            raise ConfigurationError("histograms and strings are both empty: there is nothing to release.")
        if both := sorted(set(histograms) & set(strings)):
            raise ConfigurationError(
                f"{both[0]!r} is in histograms and in strings: give it another name in one of them."
            )
        if strings and self._delta == 0:
            raise ConfigurationError(
                "strings need delta > 0, the probability with which a string of a single row may be shown."
            )


def noise_multiplier_for(share: float, epsilon: float, delta: float) -> float:
    """The noise multiplier of counts that take about this share of a budget.

    The Gaussian mechanism that uses up the whole budget has mu = 1 / z, and mu^2 adds up: the counts get `share` of it.
    The noise of all other releases must then be chosen so that the joint epsilon is within the budget.
    """
    return 1 / (math.sqrt(number("share", share, above=0, below=1)) * largest_mu(epsilon, delta))


def threshold(std: float, delta: float) -> int:
    """The least noised count at which a string is shown: a count of 1 reaches it with probability at most delta."""
    quantile = 0.0 if std == 0 else -float(special.ndtri(delta)) * _SLACK
    return max(1, math.ceil(1.5 + std * max(quantile, 0.0)) if std > 0 else 1)


def _stds(z: float, names: Sequence[str], weights: Mapping[str, float]) -> dict[str, float]:
    given = {name: number(f"weights[{name!r}]", weights.get(name, 1.0), above=0) for name in names}
    total = math.fsum(given.values())
    return {name: z * math.sqrt(total / weight) * _SLACK for name, weight in given.items()}


def _counts(name: str, bins_N: np.ndarray, count: int) -> NDArray[np.int64]:
    """The number of rows in each bin. A row is in at most one, so it changes one count by 1."""
    bins_N = np.asarray(bins_N)
    if bins_N.ndim != 1 or bins_N.dtype.kind not in "iu" or (len(bins_N) and bins_N.min() < -1):
        raise ConfigurationError(f"histograms[{name!r}]: give one whole number of at least -1 for every row.")
    if len(bins_N) and bins_N.max() >= count:
        raise ConfigurationError(f"histograms[{name!r}]: a bin is not below the number of bins.")
    return np.bincount(bins_N[bins_N >= 0], minlength=count).astype(np.int64)


def _noised_strings(
    total: Mapping[str, int], strings: Sequence[str], std: float, key: NoiseKey, label: str
) -> dict[str, int]:
    count_K = np.array([total.get(text, 0) for text in strings], np.int64)
    return dict(zip(strings, _noised(count_K, std, key, label).tolist(), strict=True))


def _noised(count_K: NDArray[np.int64], std: float, key: NoiseKey, label: str) -> NDArray[np.int64]:
    noise = gaussian(key.derive(label), len(count_K), std, dtype=torch.float64).numpy()
    # Added as whole numbers: round(count + noise) = count + round(noise).
    noised_K: NDArray[np.int64] = count_K + np.rint(noise).astype(np.int64)
    return noised_K
