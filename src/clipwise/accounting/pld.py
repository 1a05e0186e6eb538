"""The tight accountant: privacy loss distributions, discretised pessimistically and composed by FFT.

One step's pair of output distributions is replaced by a discrete pair on a grid of losses whose curve
delta(epsilon) lies on or above the true one everywhere ("connect the dots", Doroshenko et al. 2022). That
holds for any grid, so a coarse one costs tightness and never validity, and composing dominating pairs gives a
dominating pair. What is left is rounding in the FFT, for which `_rounding` is taken off delta.

A figure takes 0.01 to 0.5 s. Where a grid would have to be longer than `LARGEST_GRID` (very many or very
uneven steps) it is made coarser; with more than `MOST_KINDS` different steps or `MOST_STEPS` of them it is left
out. Then, and where rounding is not small against delta, the answer is the least of what is at hand: this
bound, RDP, and the closed form without amplification.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from clipwise.accounting import gaussian, library, rdp
from clipwise.accounting.composition import Amplification, Composition, Step, compose
from clipwise.accounting.gaussian import Array
from clipwise.errors import UnsupportedEventError
from clipwise.privacy import Entry

# Interval over the root mean square loss of a step: puts epsilon within about 0.05 percent.
FINENESS = 0.08
LARGEST_GRID = 2**19
LARGEST_INTERVAL = 64.0
MOST_KINDS = 64
MOST_STEPS = 10**10
UNIT_ROUNDOFF = 2.0**-53


def epsilon(history: Sequence[Entry], delta: float) -> float:
    """The smallest epsilon of a history, from above and within about 0.1 percent in ordinary cases."""
    total = compose(history)
    best = gaussian.epsilon(delta, total.unamplified_mu)
    if not total.steps or best in (0.0, math.inf):
        return best
    grid = _grid(total)
    room = delta - _rounding(total)
    if grid.possible and room > 0:
        best = min(best, _smallest_epsilon(_distribution(total, grid.interval), room))
    if not grid.fine or room < 0.9 * delta:
        best = min(best, rdp.epsilon_of(total, delta))
    return best


def delta(history: Sequence[Entry], epsilon: float) -> float:
    """The smallest delta of a history, from above."""
    total = compose(history)
    best = gaussian.delta(epsilon, total.unamplified_mu)
    if not total.steps or best == 0:
        return best
    grid = _grid(total)
    rounding = _rounding(total)
    if grid.possible:
        by_losses = float(_distribution(total, grid.interval).get_delta_for_epsilon(epsilon))
        best = min(best, max(by_losses, 0.0) + rounding)
    if not grid.fine or rounding > 0.1 * best:
        best = min(best, rdp.delta_of(total, epsilon))
    return best


def _smallest_epsilon(distribution: Any, delta: float) -> float:
    if distribution.get_delta_for_epsilon(0.0) <= delta:
        return 0.0
    return float(distribution.get_epsilon_for_delta(delta))


def _rounding(total: Composition) -> float:
    """What the FFT may have taken off delta: its T-th power turns an error u into T u.

    Against the closed form of the Gaussian mechanism the error stays below a tenth of this.
    """
    return 1e-13 + 8 * UNIT_ROUNDOFF * total.count


class _Grid(NamedTuple):
    """The spacing of the grid of losses; does it keep epsilon within a few percent; can it be laid at all?"""

    interval: float
    fine: bool
    possible: bool


def _grid(total: Composition) -> _Grid:
    """Choose the spacing: a power of two, so that steps are found again in the cache.

    On a grid of spacing h a loss is split between its two neighbours, which adds up to h^2 / 6 to its variance
    and h^2 / 12 to its mean. FINENESS keeps both small against what all steps sum up to. Coarser, if the grid
    would be too long, or so fine that the rounding of delta, about u q, shows in masses of q / h times it.
    """
    mu = total.mu
    count, mean, variance = 1, mu * mu / 2, mu * mu
    span, noise = 4 * mu * (gaussian.TAIL + mu / 2), 0.0
    for step, times in total.steps:
        step_mean, step_variance = _loss_moments(step)
        largest = gaussian.loss_at(gaussian.TAIL, step.rate, step.z)
        count += times
        mean += times * step_mean
        variance += times * step_variance
        # How far the sum of losses reaches: by Chernoff's bound with orders k / largest, as self_compose does.
        span += 4 * largest + 16 * math.sqrt(times * step_variance) + 2 * times * step_variance / largest
        noise += times * step.rate * UNIT_ROUNDOFF * gaussian.loss_at(3.0, step.rate, step.z)
    wanted = FINENESS * math.sqrt(min(variance, 2 * mean) / count)
    needed = max(span / LARGEST_GRID, math.sqrt(1e3 * noise))
    interval = 2.0 ** math.floor(math.log2(max(wanted, needed)))
    possible = len(total.steps) <= MOST_KINDS and count <= MOST_STEPS and interval <= LARGEST_INTERVAL
    return _Grid(interval, possible and needed <= 8 * wanted, possible)


@lru_cache(maxsize=256)
def _loss_moments(step: Step) -> tuple[float, float]:
    return gaussian.loss_moments(step.rate, step.z)


@lru_cache(maxsize=4)
def _distribution(total: Composition, interval: float) -> Any:
    """The privacy loss distribution of a whole history."""
    parts = [_of_step(step, interval).self_compose(count) for step, count in total.steps]
    if total.mu > 0:
        parts.append(_of_gaussian(1 / total.mu, interval))
    result = parts[0]
    for part in parts[1:]:
        result = result.compose(part)
    return result


@lru_cache(maxsize=32)
def _of_step(step: Step, interval: float) -> Any:
    """The privacy loss distribution of one amplified step."""
    if step.amplification is Amplification.COIN:
        return _of_coin(step.rate, step.z, interval)
    if step.amplification is Amplification.DRAW:
        return _of_draw(step.rate, step.z, interval)
    raise UnsupportedEventError(f"The PLD accountant has no bound for {step.amplification}.")


def _of_coin(rate: float, z: float, interval: float) -> Any:
    """Poisson sampling: the pair (P, Q), and (Q, P), which is the same discrete pair read backwards.

    A mass m at loss l under P is a mass m e^-l under Q, at loss -l of the other direction; what Q has below
    the grid is lost to that direction.
    """
    first = math.floor(gaussian.loss_at(-gaussian.TAIL - 1 / z, rate, z) / interval)
    last = math.ceil(gaussian.loss_at(gaussian.TAIL, rate, z) / interval)
    losses = interval * np.arange(first, last + 1)
    masses, lost = _connect_dots(gaussian.hockey_stick(losses, rate, z), interval)
    backwards = (masses * np.exp(-losses))[::-1]
    below = float(special.ndtr(-gaussian.TAIL))
    return _pld(_pmf(first, masses, lost, interval), _pmf(-last, backwards, below, interval))


def _of_draw(rate: float, z: float, interval: float) -> Any:
    """Fixed-size batches under replace-one: C_p, whose curve is that of (P, Q) for epsilon >= 0.

    Symmetry gives the rest: the mass at -l is e^-l times that at l, and what is left lies at loss 0.
    """
    last = math.ceil(gaussian.loss_at(gaussian.TAIL, rate, z) / interval)
    losses = interval * np.arange(last + 1)
    masses, lost = _connect_dots(gaussian.hockey_stick(losses, rate, z), interval)
    positive, negative = masses[1:], (masses * np.exp(-losses))[:0:-1]
    at_zero = max(0.0, 1 - lost - float(positive.sum() + negative.sum()))
    return _pld(_pmf(-last, np.concatenate([negative, [at_zero], positive]), lost, interval))


def _of_gaussian(z: float, interval: float) -> Any:
    """The Gaussian mechanism, which is symmetric."""
    last = math.ceil(gaussian.loss_at(gaussian.TAIL, 1.0, z) / interval)
    losses = interval * np.arange(-last, last + 1)
    masses, lost = _connect_dots(gaussian.hockey_stick(losses, 1.0, z), interval)
    return _pld(_pmf(-last, masses, lost, interval))


def _connect_dots(deltas: Array, interval: float) -> tuple[Array, float]:
    """Masses of the discrete pair whose curve goes through `deltas`, linearly in e^epsilon, and its mass at inf.

    With drops g_i = delta_i - delta_{i+1} the mass at loss i is (e^h g_{i-1} - g_i) / (e^h - 1); below the
    grid the curve is joined to delta = 1 at epsilon = -inf, above it stays at the last delta.
    """
    drops = -np.diff(np.minimum.accumulate(deltas))
    before = np.concatenate([[(1 - deltas[0]) * -math.expm1(-interval)], drops])
    after = np.concatenate([drops, [0.0]])
    masses = (math.exp(interval) * before - after) / math.expm1(interval)
    return np.maximum(masses, 0.0), float(np.min(deltas))


def _pmf(first: int, masses: Array, lost: float, interval: float) -> Any:
    dense = library.load("dp_accounting.pld.pld_pmf").DensePLDPmf
    normal = np.where(masses > 1e-300, masses, 0.0)  # subnormal masses make logarithms overflow
    return dense(interval, first, normal, lost, True)


def _pld(*pmfs: Any) -> Any:
    return library.load("dp_accounting.pld.privacy_loss_distribution").PrivacyLossDistribution(*pmfs)
