"""delta(epsilon) of privacy losses at many epsilons at once: one pass over the losses, then a lookup each."""

from __future__ import annotations

import math

import numpy as np
from scipy import signal

from clipwise.accounting.gaussian import Array
from clipwise.accounting.losses import Losses

# 7 n u for the longest grids, n = 2^21.
ROUNDING = 2.0**-29


class Table:
    """The curve of `losses`, ready to be asked for any epsilon.

    With U_j = lost + sum_{i >= j} m_i and W_j = sum_{i >= j} m_i e^(l_j - l_i), and l_j the first loss above
    epsilon, delta(epsilon) = U_j - e^(epsilon - l_j) W_j.
    """

    def __init__(self, losses: Losses) -> None:
        self._first, self._interval = losses.first, losses.interval
        downwards = losses.masses[::-1]
        upper = losses.lost + np.cumsum(downwards)
        weighted = signal.lfilter([1.0], [1.0, -math.exp(-losses.interval)], downwards)
        self._upper = np.append(upper[::-1], losses.lost)
        self._weighted = np.append(weighted[::-1], 0.0)

    def __call__(self, epsilons: Array) -> Array:
        """delta at every epsilon, of either sign."""
        last = len(self._upper) - 1
        positions = np.floor(epsilons / self._interval) + 1 - self._first
        index = np.clip(positions, 0, last).astype(np.int64)
        first_above = self._interval * (self._first + index)
        share = np.exp(np.minimum(epsilons - first_above, 0.0))
        deltas: Array = self._upper[index] - share * self._weighted[index]
        return deltas

    def from_above(self, epsilons: Array) -> Array:
        """The same, rounded up: U - W is good to 4 n u U, and U(e) <= delta(e - 1) / (1 - 1/e)."""
        deltas: Array = np.maximum(self(epsilons), 0.0) + ROUNDING * np.maximum(self(epsilons - 1), 0.0)
        return deltas
