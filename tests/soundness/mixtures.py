"""Exact output distributions of a step on a tiny data set: mixtures of Gaussians, one for each possible draw.

With s the noise, D and D' neighbours and m(d), m'(d) the sums of the draw d,

    P = sum_d p(d) N(m(d), s^2),   P' = sum_d p(d) N(m'(d), s^2),   delta(epsilon) = integral max(0, P - e^epsilon P').

Nothing here knows about accounting. Integrals are sums over a grid.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipwise.sampling.base import Scheme
from clipwise.sampling.schemes import FixedSize, Full, Partition, Poisson, Shuffled, TruncatedPoisson

Array = NDArray[np.float64]
Draw = tuple[int, ...]
Law = dict[Draw, float]

FARTHEST = 7.0  # in standard deviations beyond all means


def law(scheme: Scheme) -> Law:
    """The probability of every batch of a step, from the definition of the scheme."""
    N = scheme.dataset_size
    found: Counter[Draw] = Counter()
    if isinstance(scheme, (Poisson, TruncatedPoisson)):
        q = scheme.sample_rate
        limit = scheme.max_batch_size if isinstance(scheme, TruncatedPoisson) else N
        for drawn in _subsets(range(N)):
            kept = list(itertools.combinations(drawn, min(len(drawn), limit)))
            for batch in kept:
                found[batch] += q ** len(drawn) * (1 - q) ** (N - len(drawn)) / len(kept)
    elif isinstance(scheme, FixedSize):
        k = scheme.microbatches
        classes = [itertools.combinations(range(j, N, k), scheme.batch_size // k) for j in range(k)]
        batches = [tuple(sorted(sum(choice, ()))) for choice in itertools.product(*classes)]
        found.update({batch: 1 / len(batches) for batch in batches})  # type: ignore[arg-type]
    elif isinstance(scheme, Partition):
        b = scheme.microbatch_size
        blocks = [tuple(range(first, min(first + b, N))) for first in range(0, N, b)]
        choices = list(itertools.combinations(blocks, scheme.microbatches))
        found.update({sum(choice, ()): 1 / len(choices) for choice in choices})  # type: ignore[arg-type]
    elif isinstance(scheme, Shuffled):
        batches = list(itertools.combinations(range(N), scheme.batch_size))
        found.update({batch: 1 / len(batches) for batch in batches})  # type: ignore[arg-type]
    else:
        assert isinstance(scheme, Full)
        found[tuple(range(N))] = 1.0  # type: ignore[assignment]
    return dict(found)


def _subsets(units: Sequence[int]) -> list[Draw]:
    return [s for size in range(len(units) + 1) for s in itertools.combinations(units, size)]


def frequencies(scheme: Scheme, draws: int) -> Law:
    """How often the scheme's own code draws each batch, in the first step of an epoch."""
    secrets = [number.to_bytes(8, "little") for number in range(draws)]
    counts = Counter(tuple(scheme.draw(secret, secret, 0).tolist()) for secret in secrets)
    return {batch: count / draws for batch, count in counts.items()}


def clipped(values: Any, bound: float = 1.0) -> Array:
    """Clip each number to an absolute value of at most `bound`."""
    return np.clip(np.asarray(values, dtype=np.float64), -bound, bound)


def assignments(choices: Sequence[float], units: int) -> Array:
    """All vectors with one of the choices for each unit: [A, units]."""
    return np.array(list(itertools.product(choices, repeat=units)), dtype=np.float64)


Sum = Callable[[Array, Draw], Array]  # of all assignments [A, units], the sum over those drawn [A]


def sum_of_units(values: Array, drawn: Draw) -> Array:
    """Each unit is clipped alone."""
    return clipped(values[:, list(drawn)]).sum(1)


def sum_of_microbatches(cut: Callable[[Any], list[Any]]) -> Sum:
    """Each microbatch, cut as in the library, is clipped as a whole; an empty one adds nothing."""

    def total(values: Array, drawn: Draw) -> Array:
        pieces = cut(np.array(drawn, dtype=np.int64)) if drawn else []
        means = [clipped(values[:, piece].mean(1)) for piece in pieces if len(piece)]
        return np.sum(means, axis=0) if means else np.zeros(len(values))

    return total


def neighbours(
    values: Array, probabilities: Law, total: Sum, is_replaced: bool, victims: Sequence[int]
) -> tuple[Array, list[tuple[int, int]]]:
    """Return the possible distributions, as sums for each draw [L, draws], and the pairs of neighbours.

    A replaced unit takes every other value; a zeroed-out unit is in no batch.
    """
    draws = list(probabilities)
    means_AD = np.stack([total(values, d) for d in draws], 1)
    table: dict[bytes, int] = {}
    kept: list[Array] = []

    def number(row_D: Array) -> int:
        # Draws with equal sums are one component, whatever their order.
        key = np.sort(np.round(row_D, 9) + 1j * np.array([probabilities[d] for d in draws])).tobytes()
        if key not in table:
            table[key] = len(kept)
            kept.append(row_D)
        return table[key]

    ids = [number(row) for row in means_AD]
    pairs: set[tuple[int, int]] = set()
    for victim in victims:
        if is_replaced:
            others = np.delete(values, victim, axis=1)
            groups: dict[bytes, list[int]] = {}
            for index, row in enumerate(others):
                groups.setdefault(row.tobytes(), []).append(ids[index])
            for group in groups.values():
                pairs.update(itertools.permutations(sorted(set(group)), 2))
        else:
            without_AD = np.stack([total(values, tuple(u for u in d if u != victim)) for d in draws], 1)
            for one, row in zip(ids, without_AD, strict=True):
                pairs |= {(one, other := number(row)), (other, one)}
    return np.stack(kept), sorted((a, b) for a, b in pairs if a != b)


def densities(means_LD: Array, weights_D: Array, s: float, step: float) -> Array:
    """Return each mixture's density on a grid with spacing `step`, times the spacing: [L, G]."""
    reach = float(np.abs(means_LD).max()) + FARTHEST * s
    x_G = np.arange(-reach, reach + step, step)
    found = np.zeros((len(means_LD), len(x_G)))
    for mean_L, weight in zip(means_LD.T, weights_D, strict=True):
        found += weight * np.exp(-0.5 * ((x_G - mean_L[:, None]) / s) ** 2)
    return found * (step / (s * math.sqrt(2 * math.pi)))


def delta(P: Array, Q: Array, epsilon: float) -> float:
    """Return delta(epsilon) of two distributions on one grid."""
    return float(np.maximum(P - math.exp(epsilon) * Q, 0.0).sum())
