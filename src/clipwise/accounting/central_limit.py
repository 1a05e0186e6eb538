"""The Gaussian approximation of many small steps: a diagnostic, never a guarantee.

By the central limit theorem of f-DP (Dong, Roth and Su, 2022; Bu, Dong, Long and Su, 2020) the trade-off
function of T amplified steps tends to that of one Gaussian mechanism, G_mu. For finite T it may lie on either
side of the true one, and may under-report epsilon by a factor of 2.3. So nothing here is called epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import special

from clipwise.accounting import gaussian
from clipwise.accounting.composition import Step, amplified_step, compose
from clipwise.errors import UnsupportedEventError
from clipwise.privacy import Amplification, Entry


@dataclass(frozen=True)
class CentralLimit:
    """The Gaussian mechanism in the limit of infinitely many small steps."""

    mu: float  # sensitivity / noise of that mechanism

    def epsilon_if_it_were_true(self, delta: float) -> float:
        """Epsilon of G_mu at delta. The epsilon of the run may be larger: do not report this one."""
        return gaussian.epsilon(delta, self.mu)

    def __str__(self) -> str:
        return (
            f"mu={self.mu:.4g} by the central limit theorem: an approximation that may under-report, and no "
            "guarantee. For a bound use accounting.epsilon."
        )


def of(history: Sequence[Entry]) -> CentralLimit:
    """The approximation of a history: mu^2 adds up. Truncation, and the rounding of `compose`, are left out."""
    total = compose(history)
    taken = [(amplified_step(entry.event), entry.count) for entry in history if entry.count]
    squares = [count * mu_of_step(step) ** 2 for step, count in taken if step is not None]
    return CentralLimit(math.sqrt(math.fsum([total.mu**2, *squares])))


def mu_of_step(step: Step) -> float:
    """mu of one of many steps, from the second moment of its likelihood ratio.

    Poisson: mu = q sqrt(e^(1/z^2) - 1).
    Without replacement: mu = q sqrt(2) sqrt(e^(1/z^2) Phi(3 / 2z) + 3 Phi(-1 / 2z) - 2), which is that of C_q(G_{1/z}).
    """
    if step.z < 0.04:  # e^(1/z^2) overflows
        return math.inf
    growth = math.expm1(step.z**-2)
    if step.amplification is Amplification.POISSON:
        return step.rate * math.sqrt(growth)
    if step.amplification is Amplification.WITHOUT_REPLACEMENT:
        moment = growth * float(special.ndtr(1.5 / step.z)) + _draw_rest(step.z)
        return step.rate * math.sqrt(2 * max(moment, 0.0))
    raise UnsupportedEventError(f"The central limit theorem is not known for {step.amplification}.")


def _draw_rest(z: float) -> float:
    """Phi(3 / 2z) + 3 Phi(-1 / 2z) - 2, about -1 / 5z^3, without the halves, which would cancel."""
    if z > 1e8:  # negligible next to the 1 / 2z^2 that it is added to; only rounding error would remain
        return 0.0
    return 0.5 * (math.erf(1.5 / (z * math.sqrt(2))) - 3 * math.erf(0.5 / (z * math.sqrt(2))))
