"""Every input gives a valid bound or infinity: never a negative number, a NaN, a crash or a hang."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipwise.accounting import accountants, gaussian
from clipwise.privacy import Entry

Make = Callable[..., Entry]
SECONDS = 15.0  # seconds; a few on an idle machine


def log_uniform(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high).map(lambda x: 10.0**x)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["poisson", "fixed-size"]),
    log_uniform(-9, 0),
    log_uniform(-2, 3),
    log_uniform(0, 9).map(int),
    log_uniform(-30, -0.5),
)
def test_any_input_has_a_bound(entry: Make, sampling: str, rate: float, z: float, steps: int, delta: float) -> None:
    history = [entry(sampling, min(rate, 1.0), z, steps)]
    start = time.process_time()
    epsilon = accountants.epsilon_of(history, delta)
    assert time.process_time() - start < SECONDS
    assert 0 <= epsilon <= gaussian.epsilon(delta, math.sqrt(steps) / z) * (1 + 1e-9)
    # All steps together cost at least as much as one.
    one_step = gaussian.hockey_stick(np.array([epsilon]), min(rate, 1.0), z)[0]
    assert one_step <= delta * (1 + 1e-9)
    start = time.process_time()
    # The bound by participations searches delta on a grid that is coarse below 1e-20.
    assert 0 <= accountants.delta_of(history, epsilon) <= delta * (1.05 if delta > 1e-20 else 1e10)
    assert time.process_time() - start < SECONDS


@pytest.mark.parametrize("sampling", ["poisson", "fixed-size"])
@pytest.mark.parametrize(
    ("rate", "z", "steps", "delta"),
    [
        (1e-9, 0.05, 10**9, 1e-30),
        (1e-9, 1.0, 10**9, 1e-30),
        (1e-9, 0.05, 1, 1e-30),
        (0.5, 0.05, 10**9, 1e-30),
        (1.0, 0.05, 10**9, 1e-30),
        (1e-300, 1e-300, 10**18, 1e-300),
        (0.5, 1e300, 10**18, 0.999),
        (1 - 2.0**-53, 1.0, 10, 5e-324),
    ],
)
def test_named_extremes(entry: Make, sampling: str, rate: float, z: float, steps: int, delta: float) -> None:
    history = [entry(sampling, rate, z, steps)]
    start = time.process_time()
    epsilon = accountants.epsilon_of(history, delta)
    assert epsilon >= 0
    for at in (0.0, 1.0, 1e300):
        assert 0 <= accountants.delta_of(history, at) <= 1
    assert time.process_time() - start < 2 * SECONDS


@settings(max_examples=60, deadline=None)
@given(log_uniform(-300, 300), log_uniform(-300, -1e-6), log_uniform(-300, 300))
def test_the_closed_form_has_no_holes(mu: float, delta: float, epsilon: float) -> None:
    found = gaussian.epsilon(delta, mu)
    assert found >= 0
    assert 0 <= gaussian.delta(epsilon, mu) <= 1
    if math.isfinite(found):
        assert gaussian.delta(found, mu) <= max(delta, 0.4 * mu)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_mixtures_of_extremes(entry: Make, seed: int) -> None:
    rng = np.random.default_rng(seed)
    history = [
        entry("poisson", float(10 ** rng.uniform(-9, 0)), float(10 ** rng.uniform(-2, 3)), int(10 ** rng.uniform(0, 7)))
        for _ in range(4)
    ]
    delta = float(10 ** rng.uniform(-20, -1))
    start = time.process_time()
    epsilon = accountants.epsilon_of(history, delta)
    assert epsilon >= max(accountants.epsilon_of([part], delta) for part in history) * 0.99
    assert time.process_time() - start < 5 * SECONDS
