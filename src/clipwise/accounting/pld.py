"""The tight accountant: privacy loss distributions on a grid, composed by FFT.

Everything that is discretised is an upper bound (losses.py); the rounding of the FFT is taken off delta.
A figure takes 5 to 300 ms. Where a grid would have to be longer than `LARGEST_GRID` (very many or very uneven
steps) it is made coarser; with more than `MOST_KINDS` different steps or `MOST_STEPS` of them it is left out.
Then, and where rounding is not small against delta, the answer is the least of what is at hand: this bound,
RDP, and the closed form without amplification.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy import special

from clipwise.accounting import gaussian, rdp
from clipwise.accounting.composition import Amplification, Composition, Step, compose
from clipwise.accounting.losses import Losses, add_up, connect_dots, grid
from clipwise.errors import UnsupportedEventError
from clipwise.privacy import Entry

# Interval over the root mean square loss of a step: puts epsilon within about 0.03 percent.
FINENESS = 0.05
LARGEST_GRID = 2**19
LARGEST_INTERVAL = 64.0
MOST_KINDS = 256
MOST_STEPS = 10**10
UNIT_ROUNDOFF = 2.0**-53


def epsilon(history: Sequence[Entry], delta: float) -> float:
    """The smallest epsilon of a history, from above and within about 0.1 percent in ordinary cases."""
    total = compose(history)
    best = gaussian.epsilon(delta, total.unamplified_mu)
    if not total.steps or best in (0.0, math.inf):
        return best
    spacing = _spacing(total)
    room = delta - _rounding(total)
    if spacing.possible and room > 0.5 * delta:
        best = min(best, max(losses.epsilon(room) for losses in _directions(total, spacing.interval)))
    if not spacing.fine or room < 0.9 * delta:
        best = min(best, rdp.epsilon_of(total, delta))
    return best


def delta(history: Sequence[Entry], epsilon: float) -> float:
    """The smallest delta of a history, from above."""
    total = compose(history)
    best = gaussian.delta(epsilon, total.unamplified_mu)
    if not total.steps or best == 0:
        return best
    spacing = _spacing(total)
    rounding = _rounding(total)
    if spacing.possible:
        by_losses = max(losses.delta(epsilon) for losses in _directions(total, spacing.interval))
        best = min(best, max(by_losses, 0.0) + rounding)
    if not spacing.fine or rounding > 0.1 * best:
        best = min(best, rdp.delta_of(total, epsilon))
    return best


def _rounding(total: Composition) -> float:
    """What the FFT may have taken off delta: its T-th power turns an error u into T u.

    Against the closed form of the Gaussian mechanism the error stays below a tenth of this.
    """
    return 1e-13 + 8 * UNIT_ROUNDOFF * total.count


class _Spacing(NamedTuple):
    """The spacing of the grid of losses; does it keep epsilon within a few percent; can it be laid at all?"""

    interval: float
    fine: bool
    possible: bool


def _spacing(total: Composition) -> _Spacing:
    """Choose the spacing: a power of two, so that steps are found again in the cache.

    On a grid of spacing h a loss is split between its two neighbours, which adds up to h^2 / 6 to its variance
    and h^2 / 12 to its mean. FINENESS keeps both small against what all steps sum up to. Coarser, if the grid
    would be too long, or so fine that the rounding of delta, about u q, shows in masses of q / h times it.
    """
    mu = total.mu
    count, mean, variance = 1, mu * mu / 2, mu * mu
    span, noise = 2 * mu * (gaussian.TAIL + mu / 2), 0.0
    for step, times in total.steps:
        step_mean, step_variance = _loss_moments(step)
        count += times
        mean += times * step_mean
        variance += times * step_variance
        span += 3 * gaussian.loss_at(gaussian.TAIL, step.rate, step.z)
        noise += times * step.rate * UNIT_ROUNDOFF * gaussian.loss_at(3.0, step.rate, step.z)
    span += 2 * gaussian.TAIL * math.sqrt(variance)
    wanted = FINENESS * math.sqrt(min(variance, 2 * mean) / count)
    needed = max(span / LARGEST_GRID, math.sqrt(1e3 * noise))
    if math.isinf(needed):
        return _Spacing(math.inf, fine=False, possible=False)
    interval = 2.0 ** math.floor(math.log2(max(wanted, needed)))
    possible = len(total.steps) <= MOST_KINDS and count <= MOST_STEPS and interval <= LARGEST_INTERVAL
    return _Spacing(interval, possible and needed <= 16 * wanted, possible)


@lru_cache(maxsize=256)
def _loss_moments(step: Step) -> tuple[float, float]:
    return gaussian.loss_moments(step.rate, step.z)


@lru_cache(maxsize=4)
def _directions(total: Composition, interval: float) -> tuple[Losses, ...]:
    """The losses of a whole history: those of one symmetric pair, or those of both directions."""
    parts = [(_of_step(step, interval), count) for step, count in total.steps]
    if total.mu > 0:
        parts.append(((_of_gaussian(1 / total.mu, interval),), 1))
    asymmetric = any(len(directions) == 2 for directions, _ in parts)
    return tuple(
        add_up([(directions[-1 if back else 0], count) for directions, count in parts])
        for back in ((False, True) if asymmetric else (False,))
    )


@lru_cache(maxsize=32)
def _of_step(step: Step, interval: float) -> tuple[Losses, ...]:
    """The losses of one amplified step: of one symmetric pair, or of both directions."""
    if step.amplification is Amplification.COIN:
        return _of_coin(step.rate, step.z, interval)
    if step.amplification is Amplification.DRAW:
        return (_of_draw(step.rate, step.z, interval),)
    raise UnsupportedEventError(f"The PLD accountant has no bound for {step.amplification}.")


def _of_coin(rate: float, z: float, interval: float) -> tuple[Losses, Losses]:
    """Poisson sampling: the pair (P, Q), and (Q, P), which is the same discrete pair read backwards.

    A mass m at loss l under P is a mass m e^-l under Q, at loss -l of the other direction; what Q has below
    the grid is lost to that direction.
    """
    first = math.floor(gaussian.loss_at(-gaussian.TAIL - 1 / z, rate, z) / interval)
    last = math.ceil(gaussian.loss_at(gaussian.TAIL, rate, z) / interval)
    losses = grid(first, last, interval)
    masses, lost = connect_dots(gaussian.hockey_stick(losses, rate, z), interval)
    backwards = (masses * np.exp(-losses))[::-1]
    below = float(special.ndtr(-gaussian.TAIL))
    return Losses(interval, first, masses, lost), Losses(interval, -last, backwards, below)


def _of_draw(rate: float, z: float, interval: float) -> Losses:
    """Fixed-size batches under replace-one: C_p, whose curve is that of (P, Q) for epsilon >= 0.

    Symmetry gives the rest: the mass at -l is e^-l times that at l, and what is left lies at loss 0.
    """
    last = math.ceil(gaussian.loss_at(gaussian.TAIL, rate, z) / interval)
    losses = grid(0, last, interval)
    masses, lost = connect_dots(gaussian.hockey_stick(losses, rate, z), interval)
    positive, negative = masses[1:], (masses * np.exp(-losses))[:0:-1]
    at_zero = max(0.0, 1 - lost - float(positive.sum() + negative.sum()))
    return Losses(interval, -last, np.concatenate([negative, [at_zero], positive]), lost)


def _of_gaussian(z: float, interval: float) -> Losses:
    """The Gaussian mechanism, which is symmetric."""
    last = math.ceil(gaussian.loss_at(gaussian.TAIL, 1.0, z) / interval)
    losses = grid(-last, last, interval)
    masses, lost = connect_dots(gaussian.hockey_stick(losses, 1.0, z), interval)
    return Losses(interval, -last, masses, lost)
