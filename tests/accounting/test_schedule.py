from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipwise.accounting import accountants, pld
from clipwise.accounting.composition import Composition, Step, with_few_kinds
from clipwise.privacy import Adjacency, Amplification, Entry, Event, Sampling, Unit

DELTA = 1e-5


def composition(rates: np.ndarray, noises: np.ndarray, counts: np.ndarray) -> Composition:
    steps = tuple(
        (Step(Amplification.POISSON, float(q), float(z)), int(n)) for q, z, n in zip(rates, noises, counts, strict=True)
    )
    return Composition(0.0, steps, float(np.sqrt((counts / noises**2).sum())))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(20, 200), st.booleans(), st.integers(16, 64))
def test_every_step_becomes_a_worse_one(seed: int, size: int, many_rates: bool, most: int) -> None:
    """Sorted from worst to best, each kind is at least as bad as the step at the same position."""
    rng = np.random.default_rng(seed)
    rates = rng.uniform(0.001, 0.5, size) if many_rates else np.full(size, 0.01)
    total = composition(rates, np.exp(rng.uniform(-1, 3, size)), rng.integers(1, 10**6, size))
    few = with_few_kinds(total, most)
    assert len(few.steps) <= max(most, len(total.steps) if len(total.steps) <= most else most)
    assert sum(n for _, n in few.steps) == sum(n for _, n in total.steps) and few.unamplified_mu == total.unamplified_mu
    for threshold in {step.z for step, _ in few.steps}:
        noisier = sum(n for step, n in total.steps if step.z < threshold)
        assert sum(n for step, n in few.steps if step.z < threshold) >= noisier
    for threshold in {step.rate for step, _ in few.steps}:
        larger = sum(n for step, n in total.steps if step.rate > threshold)
        assert sum(n for step, n in few.steps if step.rate > threshold) >= larger


def test_few_kinds_are_unchanged() -> None:
    total = composition(np.full(3, 0.1), np.array([1.0, 2.0, 3.0]), np.array([1, 2, 3]))
    assert with_few_kinds(total, 3) is total


def test_both_amplifications_keep_their_kind() -> None:
    steps = [
        (Step(kind, 0.1, 1 + 0.01 * i), 1)
        for i in range(50)
        for kind in (Amplification.POISSON, Amplification.WITHOUT_REPLACEMENT)
    ]
    few = with_few_kinds(Composition(0.0, tuple(steps), 10.0), 20)
    for kind in Amplification:
        assert sum(n for step, n in few.steps if step.amplification is kind) == 50


@pytest.mark.slow
def test_rounding_costs_less_than_a_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    total = composition(np.full(120, 0.01), np.linspace(3.0, 0.8, 120), np.full(120, 10))
    exact = pld.epsilon(total, DELTA)
    monkeypatch.setattr(pld, "MOST_KINDS", 60)
    assert exact <= pld.epsilon(total, DELTA) <= 1.02 * exact  # a quarter of the kinds, so four times the error


@pytest.mark.slow
def test_a_hundred_thousand_different_steps_take_seconds() -> None:
    event = Event(Sampling.POISSON, Adjacency.ZERO_OUT, Unit.RECORD, 1.0, 1e-3)
    noises = np.linspace(2.0, 0.8, 10**5)
    history = [Entry(replace(event, noise_multiplier=float(z)), 1) for z in noises]
    start = time.process_time()
    found = accountants.epsilon_of(history, DELTA)
    assert time.process_time() - start < 15
    block = 10**5 // 64
    middles = noises[block // 2 :: block]
    few = Composition(0.0, tuple((Step(Amplification.POISSON, 1e-3, float(z)), block) for z in middles), np.inf)
    # Steps in blocks of equal size at the block's middle: the true value up to second order.
    middle = max(x.epsilon(DELTA) for x in pld._directions(few, pld._spacing(few, 2).interval, 2))
    assert 0.999 * middle <= found <= 1.01 * middle
