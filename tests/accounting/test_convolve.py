from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipwise.accounting import gaussian, pld
from clipwise.accounting.convolve import Spectrum, _gathered, _power, _Table, _trimmed, add_up
from clipwise.accounting.losses import Losses

PAIR = Losses(0.5, -1, np.array([0.3, 0.1, 0.4, 0.15]), 0.05)


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
    total = add_up([(PAIR, 3), (other, 2)])
    sums, lost = enumerate_sums([(PAIR, 3), (other, 2)])
    found = {total.first + i: m for i, m in enumerate(total.masses) if m > 1e-12}
    assert found == pytest.approx({k: m for k, m in sums.items() if m > 1e-12}, abs=1e-12)
    assert lost <= total.lost <= lost + 1e-9


def test_trimming_moves_mass_up_and_never_drops_it() -> None:
    part = Losses(0.5, -3, np.array([0.01, 0.02, 0.5, 0.3, 0.02, 0.01]), 0.14)
    trimmed = _trimmed(part, 0.04)
    assert trimmed.first == -1
    assert list(trimmed.masses) == pytest.approx([0.53, 0.3])
    assert trimmed.lost == pytest.approx(0.17)
    assert _trimmed(part, 1.0).lost + _trimmed(part, 1.0).masses.sum() == pytest.approx(1.0)


def test_a_sum_is_lost_if_any_of_its_terms_is() -> None:
    mostly = Losses(0.5, 0, np.array([0.05]), 0.95)
    assert add_up([(mostly, 1)]).lost >= 0.95
    assert add_up([(mostly, 2)]).lost == pytest.approx(1 - 0.05**2, rel=1e-6)


@pytest.mark.parametrize("level", [1.0, 1e-3, 1e-9, 1e-30])
def test_a_sum_is_a_bound_for_any_level(level: float) -> None:
    """Tight around its level, and an upper bound everywhere."""
    sums, lost = enumerate_sums([(PAIR, 6)])
    total = add_up([(PAIR, 6)], level)
    for epsilon in (-1.0, 0.0, 0.5, 2.0, 5.0):
        true = lost + sum(m * max(0.0, -math.expm1(epsilon - 0.5 * k)) for k, m in sums.items())
        assert true <= total.delta(epsilon)
        if level == 1.0:
            assert total.delta(epsilon) <= true + 1e-9


@pytest.mark.parametrize(("mu", "times"), [(1.0, 1), (1.0, 1000), (5.0, 10**5), (0.1, 10**6), (1.0, 10**6)])
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-12, 1e-20, 1e-30])
def test_a_composed_gaussian_bounds_its_closed_form(mu: float, times: int, delta: float) -> None:
    """Small masses keep their digits, because the masses are tilted towards the tail."""
    z = math.sqrt(times) / mu
    depth = pld._depth(delta)
    interval = 2.0 ** math.floor(math.log2(0.05 / z))
    part = pld._symmetric(pld._curve(1.0, z, interval, 8 + depth), interval)[0]
    total = add_up([(part, times)], pld._level(depth))
    exact = gaussian.epsilon(delta, mu)
    assert delta * (1 - 1e-9) <= total.delta(exact) <= delta * 1.04
    assert exact * (1 - 1e-9) <= total.epsilon(delta) <= exact * 1.002


def test_epsilon_is_confirmed_by_delta() -> None:
    part = pld._symmetric(pld._curve(1.0, 3.0, 2.0**-7, 12), 2.0**-7)[0]
    for delta in (0.3, 1e-3, 1e-8):
        total = add_up([(part, 10)], delta)
        assert total.delta(total.epsilon(delta)) <= delta


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(-1, 1))
def test_gathering_positions_only_raises_their_generating_function(seed: int, t: float) -> None:
    rng = np.random.default_rng(seed)
    positions = np.arange(-3000.0, 9000.0)
    masses = rng.dirichlet(np.ones(len(positions)))
    knots, gathered = _gathered(positions, masses)
    assert len(knots) < len(positions) / 2
    assert gathered.sum() == pytest.approx(1) and gathered @ knots == pytest.approx(masses @ positions)
    order = t / 100
    true = math.log(masses @ np.exp(order * positions))
    assert true <= math.log(gathered @ np.exp(order * knots)) + 1e-12 <= true + 0.1


def test_tilted_masses_sum_up_to_one() -> None:
    table = _Table(Losses(0.5, 0, np.array([0.5, 0.25, 0.25]), 0.0), 3)
    weights, kappa = table.tilted(0.7)
    assert weights.sum() == pytest.approx(1)
    assert kappa == pytest.approx(table.cumulants(0.7)[0])
    assert list(weights / table.masses) == pytest.approx(list(np.exp(0.7 * table.positions - kappa)))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 60), st.integers(1, 5), st.integers(1, 5))
def test_masses_are_an_upper_bound_and_close(seed: int, size: int, first: int, second: int) -> None:
    """Compared with repeated convolutions of whole numbers, which are exact."""
    rng = np.random.default_rng(seed)
    spectrum, exact, scale = Spectrum(256), np.zeros(256, dtype=object), 1
    exact[0] = 1
    for count in (first, second):
        whole = [int(n) for n in rng.integers(0, 100, size)]
        whole[0] += 1
        total = sum(whole)
        spectrum.multiply(np.array(whole) / total, count)
        for _ in range(count):
            exact = sum(np.roll(exact, j) * w for j, w in enumerate(whole))
            scale *= total
    true = np.array([int(m) / scale for m in exact])
    found = spectrum.masses(0)
    assert np.all(found >= true)
    assert found == pytest.approx(true, abs=1e-11)


def test_the_origin_may_be_any_whole_number() -> None:
    spectrum = Spectrum(16)
    spectrum.multiply(np.array([0.25, 0.0, 0.75]), 1)
    assert spectrum.masses(2 + 16 * 10**20)[0] == pytest.approx(0.75)
    assert spectrum.masses(-14)[0] == pytest.approx(0.75)


@pytest.mark.parametrize("exponent", [1, 2, 3, 12, 1000, 2**20 + 5])
def test_power(exponent: int) -> None:
    base = np.exp(2j * np.pi * np.linspace(0, 1, 7)) * 0.999999
    before = base.copy()
    assert _power(base, exponent) == pytest.approx(base**exponent, rel=1e-8)
    assert np.array_equal(base, before)


def test_the_bound_holds_for_many_steps() -> None:
    """A point mass stays one, and the rounding error of the rest grows only with the number of steps."""
    for count in (1, 10**3, 10**6):
        spectrum = Spectrum(1024)
        spectrum.multiply(np.array([0.0, 1.0]), count)
        found = spectrum.masses(count)
        assert found[0] >= 1 and np.all(found > 0)
        assert found[1:].max() <= 1e-13 * (count + 1)
