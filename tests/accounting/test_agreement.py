"""Comparison with other implementations, two-sided bounds, closed forms and samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from scipy import special

from clipwise.accounting import accountants, gaussian
from clipwise.privacy import Entry

Make = Callable[..., Entry]
DELTA = 1e-5
# (sampling rate, noise multiplier, steps): the figure must be fast and tight for these.
SETTINGS = [(0.01, 1.0, 1000), (0.004, 1.1, 15000), (0.1, 4.0, 500), (1e-4, 0.7, 200_000), (0.01, 0.5, 1000)]


@pytest.mark.parametrize(("rate", "z", "steps"), SETTINGS)
def test_poisson_within_two_sided_bounds(entry: Make, rate: float, z: float, steps: int) -> None:
    """prv_accountant bounds epsilon from both sides; ours is no lower, and at most 0.1 percent or 1e-3 above."""
    prv = pytest.importorskip("prv_accountant")
    # Half the width of its interval, as small as a few seconds and some memory allow.
    error = 0.01 if steps <= 1000 and z >= 1 else 0.02
    accountant = prv.PRVAccountant(
        prvs=[prv.PoissonSubsampledGaussianMechanism(noise_multiplier=z, sampling_probability=rate)],
        max_self_compositions=[steps],
        eps_error=error,
        delta_error=DELTA * 1e-4,
    )
    low, estimate, high = accountant.compute_epsilon(delta=DELTA, num_self_compositions=[steps])
    ours = accountants.epsilon_of([entry("poisson", rate, z, steps)], DELTA)
    assert low <= ours <= high * 1.001 + 1e-3
    assert ours == pytest.approx(estimate, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize(("rate", "z", "steps"), SETTINGS[:3])
def test_poisson_agrees_with_opacus(entry: Make, rate: float, z: float, steps: int) -> None:
    theirs_by = pytest.importorskip("opacus.accountants")
    ours = accountants.epsilon_of([entry("poisson", rate, z, steps)], DELTA)
    by_rdp, by_prv = theirs_by.RDPAccountant(), theirs_by.PRVAccountant()
    for accountant in (by_rdp, by_prv):
        accountant.history = [(z, rate, steps)]
    assert ours <= by_rdp.get_epsilon(DELTA) <= 1.5 * ours
    # Its PRV accountant returns the upper end of an interval of eps_error.
    assert ours - 1e-3 <= by_prv.get_epsilon(DELTA, eps_error=0.01) <= ours + 0.02


@pytest.mark.parametrize(("mu_of_step", "steps"), [(0.05, 100), (1.0, 1), (0.001, 10**6)])
def test_almost_certain_participation_is_the_closed_form(entry: Make, mu_of_step: float, steps: int) -> None:
    exact = gaussian.epsilon(DELTA, mu_of_step * math.sqrt(steps))
    found = accountants.epsilon_of([entry("poisson", 1 - 2.0**-40, 1 / mu_of_step, steps)], DELTA)
    assert exact * (1 - 1e-9) <= found <= exact * 1.001


def two_draws(rate: float, z: float, epsilon: float) -> float:
    """delta of two steps of fixed-size batches, by an integral over the first loss of C_p: no grid of losses.

    C_p = {l > 0 as P against Q, l < 0 as Q against P, else 0}: delta_2(e) = E[delta_1(e - l)].
    """

    def one(at: np.ndarray) -> np.ndarray:
        positive = gaussian.hockey_stick(np.abs(at), rate, z)
        return np.where(at >= 0, positive, 1 - np.exp(-np.abs(at)) * (1 - positive))

    middle = 0.5  # where the loss of (P, Q) changes its sign
    nodes, weights = np.polynomial.legendre.leggauss(400)
    total, covered = 0.0, 0.0
    edges = np.linspace(middle, 1 + 12 * z, 40)
    for a, b in pairwise(edges):
        x = 0.5 * (a + b) + 0.5 * (b - a) * nodes
        w = 0.5 * (b - a) * weights / (z * math.sqrt(2 * math.pi))
        under_q = w * np.exp(-0.5 * (x / z) ** 2)
        under_p = (1 - rate) * under_q + rate * w * np.exp(-0.5 * ((x - 1) / z) ** 2)
        losses = gaussian.loss(x, rate, z)
        # Losses l under P where P is larger, and -l under Q where Q is: the mirror image.
        total += float(under_p @ one(epsilon - losses) + under_q @ one(epsilon + losses))
        covered += float(under_p.sum() + under_q.sum())
    return total + (1 - covered) * float(one(np.array([epsilon]))[0])


@pytest.mark.parametrize(("rate", "z"), [(0.1, 1.0), (0.01, 0.6), (0.5, 2.0)])
def test_fixed_size_of_one_and_two_steps_by_integration(entry: Make, rate: float, z: float) -> None:
    for epsilon in (0.01, 0.1, 0.5):
        for steps, exact in (
            (1, float(gaussian.hockey_stick(np.array([epsilon]), rate, z)[0])),
            (2, two_draws(rate, z, epsilon)),
        ):
            found = accountants.delta_of([entry("fixed-size", rate, z, steps)], epsilon)
            assert exact * (1 - 1e-6) <= found <= exact * 1.003 + 1e-9


def test_fixed_size_dominates_an_attack_by_samples(entry: Make) -> None:
    """Two steps with real sampling under replace-one, N(1) against N(0) if drawn: the best test is bounded."""
    rng = np.random.default_rng(7)
    rate, z, size = 0.2, 0.8, 400_000

    def outputs(shift: float) -> np.ndarray:
        return shift * (rng.random((size, 2)) < rate) + z * rng.standard_normal((size, 2))

    # The worst pair of neighbours: the record's sum is 1/2 in one data set and -1/2 in the other.
    present, absent = outputs(1.0), outputs(0.0)
    for epsilon in (0.1, 0.4):
        bound = accountants.delta_of([entry("fixed-size", rate, z, 2)], epsilon)
        in_test, out_test = (gaussian.loss(x, rate, z).sum(axis=1) > epsilon for x in (present, absent))
        gap = in_test.mean() - math.exp(epsilon) * out_test.mean()
        noise = 4 * math.sqrt((in_test.mean() + math.exp(2 * epsilon) * out_test.mean()) / size)
        assert gap <= bound + noise


def test_the_closed_form_equals_the_textbook_formula() -> None:
    mu, epsilon = 0.9, 1.3
    textbook = special.ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * special.ndtr(-mu / 2 - epsilon / mu)
    assert gaussian.delta(epsilon, mu) == pytest.approx(textbook, rel=1e-10)
