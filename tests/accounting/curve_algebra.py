"""Sampling and composition of trade-off functions: an oracle for the accountant, without Gaussian losses.

A piecewise linear trade-off function is that of a pair of distributions (Q, P) with one outcome for each
straight piece: it has probability d alpha under Q and -d beta under P, and the loss log(-d beta / d alpha). The
losses of independent releases add up, on a grid as in the PLD accountant (losses.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from clipwise.accounting.convolve import add_up
from clipwise.accounting.gaussian import Array
from clipwise.accounting.losses import Losses
from clipwise.accounting.tradeoff import ROUNDING, Tradeoff, crossings, lower_hull

# Interval over the standard deviation of a release's loss, about as in pld.py.
FINENESS = 0.02
LARGEST_GRID = 2**18
SMALLEST_INTERVAL = 2.0**-40
TAIL_MASS = 1e-15
# The sums are computed once for the bulk of a curve and once for its ends; both are bounds.
LEVELS = (1.0, 1e-6)


class Pieces(NamedTuple):
    """The straight pieces of a trade-off function as outcomes of P: their losses and their probabilities."""

    losses: Array
    masses: Array
    lost: float


# The epsilons at which a product is computed: dense enough for 1e-4.
EPSILONS = np.concatenate([-np.geomspace(25.0, 1e-6, 2000), [0.0], np.geomspace(1e-6, 300.0, 2000)])


def inverse(f: Tradeoff) -> Tradeoff:
    """The curve of the other order: false positives and false negatives exchanged."""
    return Tradeoff(f.betas[::-1], f.alphas[::-1])


def is_symmetric(f: Tradeoff) -> bool:
    return np.array_equal(f.alphas, f.betas[::-1])


def symmetric(f: Tradeoff) -> Tradeoff:
    """The convex hull of f and its inverse: the largest trade-off function that holds for both orders."""
    return f if is_symmetric(f) else Tradeoff._mirrored(f.alphas, f.betas)


def diluted(f: Tradeoff, rate: float) -> Tradeoff:
    """rate f + (1 - rate) Id: one order of Poisson sampling."""
    if rate == 0:
        return Tradeoff.identity()
    alphas = f.alphas if f.alphas[-1] == 1 else np.append(f.alphas, 1.0)
    betas = f.betas if f.alphas[-1] == 1 else np.append(f.betas, 0.0)
    return _chain(alphas, (rate * betas + (1 - rate) * (1 - alphas)) * (1 - ROUNDING))


def subsampled(f: Tradeoff, rate: float) -> Tradeoff:
    """C_p(f), p = rate: the convex hull of p f + (1 - p) Id and its inverse."""
    return symmetric(diluted(symmetric(f), rate))


def composed(*factors: tuple[Tradeoff, int]) -> Tradeoff:
    """The curve max(0, 1 - delta - e^epsilon alpha) of so many releases of each curve, for one order."""
    deltas_at = product([(f.alphas, f.betas, count) for f, count in factors])
    d = np.minimum(np.clip(np.maximum(deltas_at(EPSILONS), -np.expm1(EPSILONS)), 0.0, 1.0) + ROUNDING, 1.0)
    alphas, betas = crossings(np.expm1(EPSILONS), d)
    end = min(1.0, float(np.max((1 - d) * np.exp(-EPSILONS))))  # where the last line reaches 0
    inside = (betas > 0) & (alphas < end)
    return _chain(
        np.concatenate([[0.0], alphas[inside], [end]]), np.concatenate([[1 - float(np.min(d))], betas[inside], [0.0]])
    )


def _chain(alphas: Array, betas: Array) -> Tradeoff:
    """The curve through these points, up to the first with beta <= 0."""
    x, y = lower_hull(alphas, np.maximum(betas, 0.0))
    stop = int(np.argmax(y <= 0)) + 1
    return Tradeoff(x[:stop], y[:stop])


def product(curves: Sequence[tuple[Array, Array, int]]) -> Callable[[Array], Array]:
    """An upper bound on delta(epsilon) of P against Q, for curves given by their corners and counts."""
    parts = [(_pieces(alphas, betas), count) for alphas, betas, count in curves]
    total = sum(count for _, count in parts)
    trimmed = [(_trimmed(pieces, TAIL_MASS / total), count) for pieces, count in parts]
    interval = _interval(trimmed, total)
    on_grid = [(_on_grid(pieces, interval), count) for pieces, count in trimmed]
    sums = [add_up(on_grid, level) for level in LEVELS]

    def deltas(epsilons: Array) -> Array:
        least: Array = np.min([losses.deltas(epsilons) for losses in sums], axis=0)
        return least

    return deltas


def _pieces(alphas: Array, betas: Array) -> Pieces:
    under_q, under_p = np.diff(alphas), -np.diff(betas)
    both = (under_q > 0) & (under_p > 0)
    losses = np.log(under_p[both]) - np.log(under_q[both])
    lost = (1 - float(betas[0])) + float(under_p[under_q <= 0].sum())
    return Pieces(losses, under_p[both], lost)


def _trimmed(pieces: Pieces, tail: float) -> Pieces:
    """Without the ends that hold less than `tail`: the largest losses become infinite, the smallest rise."""
    order = np.argsort(pieces.losses)
    losses, masses = pieces.losses[order], pieces.masses[order]
    if not len(losses):
        return Pieces(np.zeros(1), np.zeros(1), pieces.lost)
    low = losses[min(int(np.searchsorted(np.cumsum(masses), tail)), len(losses) - 1)]
    kept = max(len(losses) - int(np.searchsorted(np.cumsum(masses[::-1]), tail)), 1)
    return Pieces(np.maximum(losses[:kept], low), masses[:kept], min(1.0, pieces.lost + float(masses[kept:].sum())))


def _interval(parts: Sequence[tuple[Pieces, int]], total: int) -> float:
    """Fine relative to the sum of the losses, and coarse enough for the longest grid."""
    variance = sum(count * _variance(pieces) for pieces, count in parts)
    reach = max(float(np.abs(pieces.losses).max()) for pieces, _ in parts)
    span = 2 * reach + 20 * math.sqrt(variance)
    wanted = max(FINENESS * math.sqrt(variance / total), span / LARGEST_GRID, SMALLEST_INTERVAL)
    return 2.0 ** math.floor(math.log2(wanted))


def _variance(pieces: Pieces) -> float:
    mean = float(pieces.masses @ pieces.losses)
    return float(pieces.masses @ (pieces.losses - mean) ** 2)


def _on_grid(pieces: Pieces, interval: float) -> Losses:
    """Split every outcome between its two neighbours on the grid, so that P and Q keep their totals.

    A mass m at loss l between a and a + h leaves m (1 - e^(a - l)) / (1 - e^-h) at a + h, and the rest at a. Merging
    the two gives back the old outcome, so the new pair is easier to distinguish: its curve is lower.
    """
    position = np.floor(pieces.losses / interval)
    up = pieces.masses * np.expm1(position * interval - pieces.losses) / math.expm1(-interval)
    up = np.clip(up, 0.0, pieces.masses)
    first = int(position.min())
    index = (position - first).astype(np.int64)
    masses = np.zeros(int(index.max()) + 2)
    np.add.at(masses, index, pieces.masses - up)
    np.add.at(masses, index + 1, up)
    return Losses(interval, first, masses, pieces.lost)
