from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipwise.accounting import gaussian, pld
from clipwise.accounting.losses import Losses, _trimmed, add_up, connect_dots, grid

COIN = Losses(0.5, -1, np.array([0.3, 0.1, 0.4, 0.15]), 0.05)


def enumerate_sums(parts: list[tuple[Losses, int]]) -> tuple[dict[int, float], float]:
    """The distribution of a sum by brute force."""
    sums, finite = {0: 1.0}, 1.0
    for part, count in parts:
        for _ in range(count):
            finite *= 1 - part.lost
            new: dict[int, float] = {}
            for total, mass in sums.items():
                for i, m in enumerate(part.masses):
                    new[total + part.first + i] = new.get(total + part.first + i, 0.0) + mass * m
            sums = new
    return sums, 1 - finite


def test_add_up_equals_enumeration() -> None:
    other = Losses(0.5, 2, np.array([0.5, 0.0, 0.5]), 0.0)
    total = add_up([(COIN, 3), (other, 2)])
    sums, lost = enumerate_sums([(COIN, 3), (other, 2)])
    found = {total.first + i: m for i, m in enumerate(total.masses) if m > 1e-12}
    assert found == pytest.approx({k: m for k, m in sums.items() if m > 1e-12}, abs=1e-12)
    assert lost <= total.lost <= lost + 1e-12


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 3), st.floats(0.051, 0.9))
def test_delta_and_epsilon_by_the_definition(epsilon: float, delta: float) -> None:
    losses = grid(-1, 2, 0.5)
    by_hand = COIN.lost + sum(
        m * max(0.0, 1 - math.exp(epsilon - x)) for m, x in zip(COIN.masses, losses, strict=True)
    )
    assert COIN.delta(epsilon) == pytest.approx(by_hand, abs=1e-14)
    smallest = COIN.epsilon(delta)
    assert COIN.delta(smallest) <= delta + 1e-12
    if smallest > 0:
        assert COIN.delta(smallest - 1e-6) > delta


def test_trimming_moves_mass_up_and_never_drops_it() -> None:
    part = Losses(0.5, -3, np.array([0.01, 0.02, 0.5, 0.3, 0.02, 0.01]), 0.14)
    trimmed = _trimmed(part, 0.04)
    assert trimmed.first == -1
    assert list(trimmed.masses) == pytest.approx([0.53, 0.3])
    assert trimmed.lost == pytest.approx(0.17)
    assert _trimmed(part, 1.0).lost + _trimmed(part, 1.0).masses.sum() == pytest.approx(1.0)


def test_more_lost_than_delta_is_an_infinite_epsilon() -> None:
    assert COIN.epsilon(0.049) == math.inf


def test_all_losses_positive() -> None:
    certain = Losses(0.25, 4, np.array([1.0]), 0.0)
    assert certain.epsilon(1e-9) == pytest.approx(1.0, abs=1e-8)


@settings(max_examples=15, deadline=None)
@given(
    st.floats(-3, 0).map(lambda x: 10**x),
    st.floats(0.3, 5),
    st.sampled_from([0.5, 0.1, 0.01]),
    st.floats(0, 1),
)
def test_the_discrete_pair_dominates_the_true_one(rate: float, z: float, interval: float, at: float) -> None:
    last = math.ceil(gaussian.loss_at(gaussian.TAIL, rate, z) / interval)
    points = grid(-last, last, interval)
    masses, lost = connect_dots(gaussian.hockey_stick(points, rate, z), interval)
    discrete = Losses(interval, -last, masses, lost)
    epsilon = at * last * interval
    rounding_of_sums = 1e-13
    assert (
        discrete.delta(epsilon) >= gaussian.hockey_stick(np.array([epsilon]), rate, z)[0] - rounding_of_sums
    )
    assert masses.sum() + lost == pytest.approx(1, abs=1e-9)


def test_connect_dots_passes_through_the_dots() -> None:
    points = grid(-40, 60, 0.1)
    deltas = gaussian.hockey_stick(points, 0.2, 1.0)
    masses, lost = connect_dots(deltas, 0.1)
    discrete = Losses(0.1, -40, masses, lost)
    assert [discrete.delta(p) for p in points] == pytest.approx(list(deltas), abs=1e-12)


@pytest.mark.parametrize(("mu", "times"), [(1.0, 1), (1.0, 1000), (5.0, 10**5), (0.1, 10**6), (1.0, 10**6)])
def test_the_fft_stays_within_its_rounding(mu: float, times: int) -> None:
    """Against the closed form, down to deltas that rounding drowns."""
    z = math.sqrt(times) / mu
    total = add_up([(pld._of_gaussian(z, 0.05 / z), times)])
    rounding = 1e-13 + 8 * 2.0**-53 * times
    for delta in (1e-2, 1e-5, 1e-8, 1e-10, 1e-12):
        found = total.delta(gaussian.epsilon(delta, mu))
        assert delta - 0.1 * rounding <= found <= delta * 1.02 + rounding
