from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipwise.accounting.spectrum import Spectrum, _power


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 60), st.integers(1, 5), st.integers(1, 5))
def test_masses_are_an_upper_bound_and_close(seed: int, size: int, first: int, second: int) -> None:
    """Against convolutions one by one, of whole numbers, which are exact."""
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
    """A point mass stays one, and what rounding adds to the rest grows with the steps only."""
    for count in (1, 10**3, 10**6):
        spectrum = Spectrum(1024)
        spectrum.multiply(np.array([0.0, 1.0]), count)
        found = spectrum.masses(count)
        assert found[0] >= 1 and np.all(found > 0)
        assert found[1:].max() <= 1e-13 * (count + 1)
