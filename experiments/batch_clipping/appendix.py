"""Appendix B recomputed: what the paper's noise on BN-LeNet-5 guarantees, by exact accounting.

The paper states mu of the central limit theorem for C_p(G_{sqrt(L)/sigma})^T, which is an approximation. Here stands
beside it epsilon by privacy loss distributions of the same mechanism.
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
    """What the paper says of one noise: h and mu; None where it says nothing."""

    sigma: float
    h: float | None
    mu: float | None


@dataclass(frozen=True)
class Recomputed:
    """One line of the table.

    Attributes:
        stated: the paper's.
        h, mu: by the paper's own formula.
        epsilon: by PLD, for batches of fixed size and a record replaced.
        clt_epsilon: what mu would promise if it were exact. It is no bound.
        flat_epsilon: by PLD, if the whole gradient were clipped in one part.
        poisson_epsilon: by PLD, for Poisson batches and a record left out, at the same multiplier.
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
        noise_multiplier=multiplier,
        sample_rate=BATCH / RECORDS,
        steps=STEPS,
        delta=DELTA,
        sampling=sampling,
    )
