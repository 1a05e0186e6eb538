"""The tight accountant: privacy loss distributions on a grid, composed by FFT.

All discretisation and rounding gives upper bounds (losses.py, convolve.py), for any delta. A figure takes 5 to 100 ms.
More than `MOST_KINDS` different steps are rounded to fewer (`with_few_kinds`). A grid longer than `LARGEST_GRID` (very
many or very uneven steps) is made coarser; with more than `MOST_STEPS` steps there is none. Then the answer is the
least of the available bounds: this one, RDP, the closed form without amplification, and the one from participations,
which is the only one if the noise is below `composition.SMALLEST_NOISE`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy import special

from clipwise.accounting import gaussian, participations, rdp
from clipwise.accounting.composition import Composition, Step, with_few_kinds
from clipwise.accounting.convolve import add_up, tail_mass
from clipwise.accounting.gaussian import Array
from clipwise.accounting.losses import UNIT_ROUNDOFF, Losses, both_orders, grid
from clipwise.errors import UnsupportedEventError
from clipwise.privacy import Amplification

# Interval over the root mean square loss of a step: the error of epsilon is about 0.03 percent.
FINENESS = 0.05
LARGEST_GRID = 2**19
LARGEST_INTERVAL = 64.0
MOST_KINDS = 256
MOST_STEPS = 10**10
# From here on the rounding errors of the steps become visible.
MANY_STEPS = 10**9
# Distributions are computed for deltas around 10^-0, 10^-3, 10^-6, ..., and cached.
DECADES = 3
DEEPEST = 90
PROFILE_DEPTHS = (0, 2)  # tight from 1 down to 1e-10
FAR_OUT = 38  # standard deviations; the tail beyond is below 1e-315


def epsilon(total: Composition, delta: float) -> float:
    """An upper bound on the smallest epsilon of a composition, usually within about 0.1 percent."""
    best = gaussian.epsilon(delta, total.unamplified_mu)
    if best in (0.0, math.inf):
        return best
    best = min(best, participations.epsilon(total, delta))
    if not total.steps:
        return best
    total = with_few_kinds(total, MOST_KINDS)
    spacing = _spacing(total, _depth(delta))
    if spacing.possible:
        found = _directions(total, spacing.interval, _depth(delta))
        best = min(best, max(losses.epsilon(delta) for losses in found))
    if not spacing.fine:
        best = min(best, rdp.epsilon(total, delta))
    return best


def delta(total: Composition, epsilon: float) -> float:
    """An upper bound on the smallest delta of a composition."""
    best = gaussian.delta(epsilon, total.unamplified_mu)
    if best == 0 or math.isinf(total.unamplified_mu):
        return best
    best = min(best, participations.delta(total, epsilon))
    if not total.steps:
        return best
    total = with_few_kinds(total, MOST_KINDS)
    by_losses, fine = _focused_delta(total, epsilon)
    best = min(best, by_losses)
    if not fine:
        best = min(best, rdp.delta(total, epsilon))
    return best


def profile(total: Composition, epsilons: Array) -> Array:
    """Upper bounds on the smallest deltas at many epsilons >= 0: `delta` for a whole curve in few passes."""
    mu = total.unamplified_mu
    best = np.array([gaussian.delta(float(e), mu) for e in epsilons])
    if not total.steps or math.isinf(mu):
        return best if math.isinf(mu) else np.minimum(best, participations.profile(total, epsilons))
    total = with_few_kinds(total, MOST_KINDS)
    fine = True
    for depth in PROFILE_DEPTHS:
        spacing = _spacing(total, depth)
        fine = fine and spacing.fine
        if spacing.possible:
            for_both = [losses.deltas(epsilons) for losses in _directions(total, spacing.interval, depth)]
            best = np.minimum(best, np.max(for_both, axis=0))
    if not fine:
        best = np.minimum(best, participations.profile(total, epsilons))
        best = np.minimum(best, [rdp.delta(total, float(e)) for e in epsilons])
    return best


def _depth(delta: float) -> int:
    """The index of the distribution that suits a delta best."""
    return min(DEEPEST, round(-math.log10(delta) / DECADES)) if delta > 0 else DEEPEST


def _level(depth: int) -> float:
    return float(10.0 ** (-DECADES * depth))


def _focused_delta(total: Composition, epsilon: float) -> tuple[float, bool]:
    """Use the distribution for common deltas, then the one for the delta found; returns whether its grid was fine."""
    best, depth = 1.0, 2
    tried: set[int] = set()
    while True:
        tried.add(depth)
        spacing = _spacing(total, depth)
        if not spacing.possible:
            return best, False
        found = max(losses.delta(epsilon) for losses in _directions(total, spacing.interval, depth))
        best = min(best, found)
        # Near the mass of the trimmed tails it is only known that delta is smaller.
        at_the_limit = found < 100 * tail_mass(_level(depth))
        depth = min(DEEPEST, 2 * depth + 1) if at_the_limit else _depth(best)
        if depth in tried:
            return best, spacing.fine


class _Spacing(NamedTuple):
    """The spacing of the grid of losses; whether it keeps epsilon within a few percent; whether such a grid exists."""

    interval: float
    fine: bool
    possible: bool


def _spacing(total: Composition, depth: int) -> _Spacing:
    """Choose the spacing: a power of two, so that steps are found in the cache.

    On a grid of spacing h a loss is split between its two neighbours, which adds up to h^2 / 6 to its variance
    and h^2 / 12 to its mean. FINENESS keeps both small relative to the sum of all steps. The spacing is coarser if the
    grid would be too long, or so fine that the rounding of delta, about u q, shows in masses of q / h times it.
    """
    mu, tail = total.mu, _tail(total, depth)
    count, mean, variance = 1, mu * mu / 2, mu * mu
    longest, noise = 0.0, 0.0
    for step, times in total.steps:
        step_mean, step_variance = _loss_moments(step)
        count += times
        mean += times * step_mean
        variance += times * step_variance
        longest = max(longest, gaussian.loss_at(tail, step.rate, step.z))
        noise += times * step.rate * UNIT_ROUNDOFF * gaussian.loss_at(3.0, step.rate, step.z)
    span = 2 * mu * (tail + mu / 2) + 3 * longest + 2 * tail * math.sqrt(variance)
    wanted = FINENESS * math.sqrt(min(variance, 2 * mean) / count)
    needed = max(span / LARGEST_GRID, math.sqrt(1e3 * noise))
    if math.isinf(needed):
        return _Spacing(math.inf, fine=False, possible=False)
    interval = 2.0 ** math.floor(math.log2(max(wanted, needed)))
    possible = count <= MOST_STEPS and interval <= LARGEST_INTERVAL
    return _Spacing(interval, possible and count <= MANY_STEPS and needed <= 16 * wanted, possible)


@lru_cache(maxsize=256)
def _loss_moments(step: Step) -> tuple[float, float]:
    return gaussian.loss_moments(step.rate, step.z)


@lru_cache(maxsize=8)
def _directions(total: Composition, interval: float, depth: int) -> tuple[Losses, ...]:
    """The losses of a whole history: those of one symmetric pair, or those of both directions."""
    tail = _tail(total, depth)
    parts = [(_of_step(step, interval, tail), count) for step, count in total.steps]
    if total.mu > 0:
        parts.append((_symmetric(_curve(1.0, 1 / total.mu, interval, tail), interval), 1))
    symmetric = all(directions[0] is directions[1] for directions, _ in parts)
    return tuple(
        add_up([(directions[order], count) for directions, count in parts], _level(depth))
        for order in ((0,) if symmetric else (0, 1))
    )


def _tail(total: Composition, depth: int) -> int:
    """The number of standard deviations beyond which the tails of all steps are small enough for a depth."""
    participations = 1 + sum(count * step.rate for step, count in total.steps)
    out = -float(special.ndtri(tail_mass(_level(depth)) / participations))
    return math.ceil(min(out, FAR_OUT))


@lru_cache(maxsize=32)
def _of_step(step: Step, interval: float, tail: int) -> tuple[Losses, Losses]:
    """The losses of one amplified step, in both directions; the same twice for a symmetric pair."""
    curve = _curve(step.rate, step.z, interval, tail)
    if step.amplification is Amplification.POISSON:
        # Poisson sampling: the pairs (P, Q) and (Q, P).
        lowest = float(gaussian.loss(np.array([-tail * step.z]), step.rate, step.z)[0])
        losses = grid(0, math.ceil(-lowest / interval) + 1, interval)
        back = gaussian.hockey_stick_back(losses, step.rate, step.z) * (1 + gaussian.precision(step.z))
        return both_orders(curve, back, interval)
    if step.amplification is Amplification.WITHOUT_REPLACEMENT:
        # Fixed-size batches under replace-one: C_p, symmetric, with the curve of (P, Q) for epsilon >= 0.
        return _symmetric(curve, interval)
    raise UnsupportedEventError(f"The PLD accountant has no bound for {step.amplification}.")


def _curve(rate: float, z: float, interval: float, tail: int) -> Array:
    """delta(epsilon) of (P, Q) on the grid from 0 to the tail, rounded up."""
    losses = grid(0, math.ceil(gaussian.loss_at(tail, rate, z) / interval) + 1, interval)
    return gaussian.hockey_stick(losses, rate, z) * (1 + gaussian.precision(z))


def _symmetric(curve: Array, interval: float) -> tuple[Losses, Losses]:
    losses, _ = both_orders(curve, curve, interval)
    return losses, losses
