"""The cost of a hyper-parameter search: many runs on the same data, of which only the best is released.

Releasing the best of a fixed number K of runs costs up to K times as much as one run. With a *random* number of runs it
costs little more than one (Papernot and Steinke, "Hyperparameter tuning with Renyi differential privacy",
2022), if

- the number is drawn in advance from one of the distributions below, and kept secret;
- each run uses a candidate drawn from a fixed distribution, independently of the other runs;
- only the best run is released, by an order on outputs that is fixed in advance. A score on private data is
  part of the output of a run, so its cost belongs to the history of the run.

Distributions of K, given by mean and shape: the truncated negative binomial with shape eta > -1 (eta = 1 is
the geometric, eta = 0 the logarithmic distribution; small shapes cost less and vary more), and its limit for
an infinite shape, the Poisson distribution, which varies least. It may be 0: then nothing is released.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from clipwise.accounting import pld, rdp, truncation
from clipwise.accounting.composition import Composition
from clipwise.accounting.gaussian import Array
from clipwise.errors import ConfigurationError
from clipwise.validation.arguments import number

LARGEST_MEAN = 1e9
# A shape is treated as 0 if that changes the mean by less than this fraction.
LEAST = 1e-12


@dataclass(frozen=True)
class Repetitions:
    """The distribution of the number of runs."""

    mean: float  # above 1, or just positive for a Poisson distribution
    shape: float = 1.0  # eta > -1 of a truncated negative binomial distribution; infinity for a Poisson distribution

    def __post_init__(self) -> None:
        shape = self.shape
        if isinstance(shape, bool) or not (isinstance(shape, (int, float)) and shape > -1):
            raise ConfigurationError(
                f"shape={shape!r} is not possible: it must be a number above -1: 0 for the logarithmic, 1 for the "
                "geometric, math.inf for the Poisson distribution."
            )
        number("mean", self.mean, above=0 if self.is_poisson else 1, below=LARGEST_MEAN)

    @property
    def is_poisson(self) -> bool:
        """Whether the number of runs has a Poisson distribution: the shape is infinite."""
        return math.isinf(self.shape)

    @cached_property
    def log_gamma(self) -> float:
        """log gamma of the truncated negative binomial distribution of that mean, rounded down, which costs more.

            P(K = k) ~ (1 - gamma)^k prod_{l < k} (l + eta) / (l + 1)   for k = 1, 2, ...
            E[K] = eta (1 - gamma) / (gamma (1 - gamma^eta)), or (1 - gamma) / (gamma log(1 / gamma)) at eta = 0

        The mean falls from infinity to 1 as gamma goes from 0 to 1.
        """
        low, high = -1.0, 0.0  # the mean is too large at low, too small at high
        while _log_mean(low, self.shape) < math.log(self.mean):
            low *= 2
        while low < (middle := 0.5 * (low + high)) < high:
            is_enough = _log_mean(middle, self.shape) >= math.log(self.mean)
            low, high = (middle, high) if is_enough else (low, middle)
        return low - 10 * LEAST * (1 - low)

    def draw(self, random: np.random.Generator | None = None) -> int:
        """Draw a number of runs. Keep it secret: the guarantee does not hold against an attacker that knows it."""
        random = np.random.default_rng() if random is None else random
        if self.is_poisson:
            return int(random.poisson(self.mean))
        x = -self.log_gamma
        if self.shape > 0.5:  # "truncated": a negative binomial number, conditioned on not being 0
            while (drawn := int(random.negative_binomial(self.shape, math.exp(-x)))) == 0:
                continue
            return drawn
        # P(K = 1) = eta (1 - gamma) / (gamma^-eta - 1),
        # P(K = k + 1) / P(K = k) = (1 - gamma) (k + eta) / (k + 1).
        share = 1 / x if abs(self.shape) * x < LEAST else self.shape / math.expm1(self.shape * x)
        failure = -math.expm1(-x)
        uniform, k, mass = float(random.random()), 1, share * failure
        while uniform >= mass and mass > 0:
            uniform -= mass
            mass *= failure * (k + self.shape) / (k + 1)
            k += 1
        return k

    def divergences(self, of_run: Array, deltas_of_run: Callable[[Array], Array]) -> Array:
        """Upper bounds on the Renyi divergence of the whole search at every order.

        For a truncated negative binomial number of runs, each of divergence D(alpha), and any second order b >= 1,

            D'(alpha) = D(alpha) + (1 + eta) ((1 - 1/b) D(b) + log(1/gamma) / b) + log E[K] / (alpha - 1),

        and for a Poisson number, with d = delta of one run at epsilon = log(alpha / (alpha - 1)),

            e^((alpha - 1) D'(alpha)) = E[K] e^((alpha - 1) (D(alpha) + E[K] d)) + P(K = 0).

        Both follow from the density of the best of K outputs, which is Q(y) f'(Q(outputs up to y)) with f the
        probability generating function of K; the last term is the output "nothing". `of_run` has D of one run at each
        of rdp.ORDERS.
        """
        orders = rdp.ORDERS
        choice = math.log(self.mean) / (orders - 1)
        if self.is_poisson:
            deltas = deltas_of_run(-np.log1p(-1 / orders) * (1 - LEAST))
            found = of_run + self.mean * deltas + choice
            found = np.logaddexp((orders - 1) * found, -self.mean) / (orders - 1)
        else:
            second = (1 - 1 / orders) * of_run - self.log_gamma / orders
            found = of_run + (1 + self.shape) * float(second.min()) + choice
        rounded_up: Array = np.maximum(found * (1 + rdp.SLACK) + 10 * LEAST * (1 + np.abs(choice)), 0.0)
        return rounded_up


def epsilon(total: Composition, delta: float, repetitions: Repetitions) -> float:
    """An upper bound on epsilon at delta of a search in which every run costs `total`.

    In any of the runs, batches are truncated or releases fail with probability at most E[K] X. Which run is released
    depends on all of them, so a failure counts like a truncation.
    """
    if total.is_empty:
        return 0.0
    uncut = repetitions.divergences(rdp.divergences(total), lambda losses: pld.profile(total, losses))
    excess = repetitions.mean * (total.excess + total.failure)
    return truncation.epsilon(lambda d: rdp.epsilon_from(uncut, d), delta, excess)


def _log_mean(log_gamma: float, shape: float) -> float:
    """log E[K] of the truncated negative binomial distribution; shapes near 0 are treated as 0.

    With x = log(1 / gamma), gamma^eta = e^(-eta x), and 1 - gamma = -expm1(-x).
    """
    x = -log_gamma
    if x == 0:
        return 0.0
    failures = math.log(-math.expm1(-x))
    if abs(shape) * x < LEAST:
        return failures + x - math.log(x)
    if shape > 0:
        return math.log(shape) + failures + x - math.log(-math.expm1(-shape * x))
    # 1 - e^(-eta x) and eta are negative: negate both, and factor out e^(-eta x).
    return math.log(-shape) + failures + x + shape * x - math.log(-math.expm1(shape * x))
