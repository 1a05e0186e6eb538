"""The bound from participations: above the true epsilon, and for little noise far below that without amplification."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from clipwise import accounting
from clipwise.accounting import gaussian, participations, pld
from clipwise.accounting.composition import Composition, compose
from clipwise.privacy import Entry

Make = Callable[..., Entry]
QUICK = settings(max_examples=60, deadline=None, derandomize=True)


def by_pld_alone(total: Composition, delta: float) -> float:
    return pld.epsilon(replace(total, drawn=()), delta)


@QUICK
@given(st.integers(1, 10**6), st.floats(1e-6, 0.999), st.floats(-20, -0.5))
def test_a_unit_takes_part_more_often_with_a_small_probability(steps: int, rate: float, power: float) -> None:
    missed = 10.0**power
    K = participations.most(steps, rate, missed)
    assert stats.binom.sf(K, steps, rate) <= missed
    assert K == 0 or stats.binom.sf(K - 1, steps, rate) > missed / 2.001  # and no larger than needed


@pytest.mark.parametrize("sampling", ["poisson", "fixed-size"])
@pytest.mark.parametrize("z", [0.012, 0.05, 0.3, 1.0, 4.0])
@pytest.mark.parametrize(("rate", "steps"), [(1e-3, 2000), (0.05, 100), (0.3, 7), (0.5, 1)])
@pytest.mark.parametrize("delta", [1e-2, 1e-5])
def test_it_is_never_below_the_true_epsilon(
    entry: Make, sampling: str, z: float, rate: float, steps: int, delta: float
) -> None:
    """PLD bounds it from above within 0.1 percent. With very little noise the two are close."""
    total = compose([entry(sampling, rate, z, steps)])
    true = by_pld_alone(total, delta)
    found = participations.epsilon(total, delta)
    assert found >= true * (1 - 2e-3)
    exact = pld.delta(replace(total, drawn=()), true)
    bound, coarse = participations.delta(total, true), participations.profile(total, np.array([true]))
    assert coarse[0] >= bound >= exact * (1 - 1e-2)
    assert participations.delta(total, found) <= delta * 1.01


def test_kinds_of_steps_and_sure_releases_add_up(entry: Make) -> None:
    history = [entry("poisson", 0.01, 0.02, 500), entry("poisson", 0.02, 0.05, 300), entry("full", 1.0, 0.5, 3)]
    total, delta = compose(history), 1e-5
    counts = [participations.most(500, 0.01, delta / 4), participations.most(300, 0.02, delta / 4)]
    mu = math.sqrt(counts[0] / 0.02**2 + counts[1] / 0.05**2 + 3 / 0.5**2)
    assert participations.epsilon(total, delta) == pytest.approx(gaussian.epsilon(delta / 2, mu))
    assert participations.epsilon(total, delta) >= by_pld_alone(total, delta) * (1 - 2e-3)


@pytest.mark.parametrize("sampling", ["shuffled", "full"])
def test_it_is_for_independent_draws_alone(entry: Make, sampling: str) -> None:
    rate, period = (1.0, 1) if sampling == "full" else (0.01, 100)
    total = compose([entry(sampling, rate, 0.005, 1000, period=period)])
    assert not total.drawn and participations.epsilon(total, 1e-5) == math.inf
    assert total.sure_mu == total.unamplified_mu


def test_without_noise_there_is_no_bound(entry: Make) -> None:
    assert pld.epsilon(compose([entry("poisson", 0.01, 0.0, 10)]), 1e-5) == math.inf


@pytest.mark.parametrize("sampling", ["poisson", "fixed-size"])
def test_noise_too_small_for_a_grid_is_still_amplified(sampling: str) -> None:
    """The noise of a published run: 35,157 steps, of which a record takes part in 50, and hardly ever in 85."""
    arguments = {"noise_multiplier": 0.00238, "sample_rate": 64 / 45000, "steps": 35157, "sampling": sampling}
    found = accounting.epsilon(delta=1e-5, **arguments)
    unamplified = gaussian.epsilon(1e-5, math.sqrt(35157) / 0.00238)
    assert unamplified / 430 < found < unamplified / 400
    mean = 35157 * 64 / 45000
    assert found > gaussian.epsilon(1e-5, math.sqrt(mean) / 0.00238)  # as if it took part exactly this often
    assert accounting.delta(epsilon=found, **arguments) <= 1e-5
