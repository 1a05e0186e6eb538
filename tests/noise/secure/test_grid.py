"""The grid: sums and noise are on it, and the sensitivity includes the rounding."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clipwise.noise.secure.rounded import LARGEST, grid_step, noised_on_grid, on_grid
from clipwise.privacy import Part, effective_multiplier

SIZES = st.integers(1, 10**9)
POSITIVE = st.floats(1e-12, 1e12)


def nothing(bucket: int, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.float64)


def rounded(x: Tensor, step: float) -> Tensor:
    """A sum as it is released, but for the noise."""
    return noised_on_grid([x], nothing, 1.0, step)[0]


# ---- the step -------------------------------------------------------------------------------------------


@given(sensitivity=POSITIVE, multiplier=st.floats(1e-3, 1e3), size=SIZES)
def test_the_step_is_the_largest_power_of_two_that_is_fine_enough(
    sensitivity: float, multiplier: float, size: int
) -> None:
    std = multiplier * sensitivity
    step = grid_step(sensitivity, std, size)
    assert math.frexp(step)[0] == 0.5
    limit = max(2.0**-16 * sensitivity / math.sqrt(size), 2.0**-36 * std)
    assert step <= limit < 2 * step


@given(
    sensitivities=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=5),
    multiplier=st.floats(1e-2, 1e4),
    size=SIZES,
    alone=st.booleans(),
)
def test_the_multiplier_stays_and_the_sensitivity_has_the_rounding(
    sensitivities: list[float], multiplier: float, size: int, alone: bool
) -> None:
    plain = [Part(f"{i}", (f"p{i}",), s, s * multiplier * (i + 1), alone=alone) for i, s in enumerate(sensitivities)]
    parts = on_grid(plain, {f"p{i}": size for i in range(len(plain))})
    z = effective_multiplier(plain)
    assert z <= effective_multiplier(parts) <= z * (1 + 1e-9)
    for before, part in zip(plain, parts, strict=True):
        assert part.grid == grid_step(before.sensitivity, before.noise_std, size)
        added = part.grid * math.sqrt(size)
        assert part.sensitivity >= before.sensitivity + added
        assert part.sensitivity == pytest.approx(before.sensitivity + added, rel=1e-12)
        assert part.noise_std / part.grid < 2.0**44  # as the draw requires


def test_a_part_without_noise_has_no_grid_and_a_number_has_one_coordinate() -> None:
    bare, number = on_grid([Part("a", ("w",), 1.0, 0.0), Part("count", (), 0.5, 2.0)], {"w": 4, "count": 1})
    assert bare == Part("a", ("w",), 1.0, 0.0)
    assert number.grid == 2.0**-17 and number.sensitivity == pytest.approx(0.5 + 2.0**-17)


# ---- the sensitivity of a rounded sum -------------------------------------------------------------------


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 300), apart=st.floats(0, 8), step=st.integers(-30, 3))
def test_no_two_sums_are_further_apart_than_the_stated_bound(seed: int, size: int, apart: float, step: int) -> None:
    g = 2.0**step
    random = torch.Generator().manual_seed(seed)
    a, direction = torch.randn(2, size, dtype=torch.float64, generator=random)
    b = a + apart * direction / direction.norm()
    assert (rounded(a, g) - rounded(b, g)).norm() <= ((a - b).norm() + g * math.sqrt(size)) * (1 + 1e-12)


@pytest.mark.parametrize("size", [1, 100, 10_000])
@pytest.mark.parametrize("sensitivity", [0.01, 1.3])
def test_a_neighbour_comes_near_the_bound(size: int, sensitivity: float) -> None:
    """All coordinates just below a half, and all of them a whole number of steps and a bit further."""
    g = grid_step(sensitivity, sensitivity, size)
    a = torch.full((size,), 0.4999 * g, dtype=torch.float64)
    moved = math.floor(sensitivity / math.sqrt(size) / g - 1e-3)
    b = a + (moved + 2e-4) * g
    part = Part("a", ("w",), float((a - b).norm()), 1.0)
    (stated,) = on_grid([part], {"w": size})
    assert stated.grid == g
    found = float((rounded(a, g) - rounded(b, g)).norm())
    assert found <= stated.sensitivity
    excess, allowed = found - part.sensitivity, stated.sensitivity - part.sensitivity
    assert excess > 0.999 * allowed


@given(st.lists(st.floats(allow_nan=False, allow_infinity=True), min_size=1), st.integers(-40, 3))
def test_sums_of_any_size_stay_on_the_grid_and_exact(values: list[float], step: int) -> None:
    g = 2.0**step
    found = rounded(torch.tensor(values, dtype=torch.float64), g) / g
    assert torch.equal(found, found.round()) and float(found.abs().max()) <= LARGEST


# ---- the release ----------------------------------------------------------------------------------------


def counting(bucket: int, size: int) -> Tensor:
    """Bucket k's noise is 1000 (k + 1), 1000 (k + 1) + 1, ... steps."""
    return 1000.0 * (bucket + 1) + torch.arange(size, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scales", [(), (0.5, 3.0, 1.7, 1.0, 10.0)])
def test_every_number_gets_its_own_noise_once(
    dtype: torch.dtype, scales: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipwise.noise.gaussian.BUCKET", 100)
    g, divisor = 2.0**-9, 7.3
    random = torch.Generator().manual_seed(0)
    sums = [torch.randn(s, dtype=dtype, generator=random) for s in ((3, 4), (), (150,), (60, 1), (0, 3))]
    given = [t.clone() for t in sums]
    found = noised_on_grid(given, counting, divisor, g, scales)
    assert given == []  # memory is freed early
    noise = [counting(0, 13).split([12, 1]), (counting(1, 150),), counting(2, 60).split([60, 0])]
    flat = [t for bucket in noise for t in bucket]
    for total, steps, out, m in zip(sums, flat, found, scales or (1.0,) * 5, strict=True):
        assert out.shape == total.shape and out.dtype == dtype
        expected = (torch.round(m * total.double() / g) + steps.view_as(total)) * g / (m * divisor)
        torch.testing.assert_close(out.double(), expected, rtol=1e-6 if dtype == torch.float32 else 1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_divisor_that_is_a_power_of_two_leaves_multiples_of_the_grid(dtype: torch.dtype) -> None:
    """float32 has fewer digits than steps at times, and then rounds to larger powers of two."""
    g, divisor = 2.0**-26, 64.0
    total = 1e3 * torch.randn(5000, dtype=dtype, generator=torch.Generator().manual_seed(1))
    (found,) = noised_on_grid([total], counting, divisor, g)
    steps = found.double() * divisor / g
    assert torch.equal(steps, steps.round())


def test_below_float32_the_release_is_float32() -> None:
    (found,) = noised_on_grid([torch.ones(3, dtype=torch.bfloat16)], nothing, 2.0, 2.0**-20)
    assert found.dtype == torch.float32 and torch.equal(found, torch.full((3,), 0.5))
