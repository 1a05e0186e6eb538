"""Appendix B recomputed: the guarantee of the paper's noise on BN-LeNet-5, by exact accounting.

The paper states mu of the central limit theorem for C_p(G_{sqrt(L)/sigma})^T, which is an approximation. The table
adds epsilon by privacy loss distributions of the same mechanism.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from clipwise import accounting

RECORDS, BATCH, EPOCHS, LAYERS, DELTA = 54_000, 64, 50, 8, 1e-5
STEPS = EPOCHS * RECORDS // BATCH


@dataclass(frozen=True)
class Stated:
    """h and mu in the paper for one noise; None if the paper has no value."""

    sigma: float
    h: float | None
    mu: float | None


@dataclass(frozen=True)
class Recomputed:
    """One line of the table.

    Attributes:
        stated: the values in the paper.
        h, mu: by the paper's formula.
        epsilon: by PLD, for batches of fixed size and replace-one adjacency.
        clt_epsilon: the epsilon of mu if mu were exact. It is not a bound.
        flat_epsilon: by PLD, if the whole gradient were one part.
        poisson_epsilon: by PLD, for Poisson batches and zero-out adjacency, at the same multiplier.
    """

    stated: Stated
    h: float
    mu: float
    epsilon: float
    clt_epsilon: float
    flat_epsilon: float
    poisson_epsilon: float


STATED = (Stated(2.5, 1.513, 0.52), Stated(1.5, 5.783, 1.99), Stated(0.5, None, None))


def recomputed() -> list[Recomputed]:
    """A line for each noise of the appendix."""
    return [_recomputed(stated) for stated in STATED]


def h_of(multiplier: float) -> float:
    """h = sqrt(e^(1/s^2) Phi(3 / 2s) + 3 Phi(-1 / 2s) - 2), of one noise multiplier s."""
    Phi = NormalDist().cdf
    return math.sqrt(math.exp(multiplier**-2) * Phi(1.5 / multiplier) + 3 * Phi(-0.5 / multiplier) - 2)


def _recomputed(stated: Stated) -> Recomputed:
    joint = stated.sigma / math.sqrt(LAYERS)
    h = h_of(joint)
    mu = math.sqrt(2 * EPOCHS * BATCH / RECORDS) * h
    return Recomputed(
        stated,
        h,
        mu,
        epsilon=_epsilon(joint, "fixed-size"),
        # One Gaussian mechanism with multiplier 1 / mu is mu-GDP.
        clt_epsilon=accounting.epsilon(
            noise_multiplier=1 / mu, steps=1, delta=DELTA, sampling="full", accountant="gdp"
        ),
        flat_epsilon=_epsilon(stated.sigma, "fixed-size"),
        poisson_epsilon=_epsilon(joint, "poisson"),
    )


def _epsilon(multiplier: float, sampling: str) -> float:
    return accounting.epsilon(
        noise_multiplier=multiplier, sample_rate=BATCH / RECORDS, steps=STEPS, delta=DELTA, sampling=sampling
    )
