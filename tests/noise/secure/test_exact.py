"""The exact path: whole numbers that neither rounding nor further bits can change."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from clipwise.noise.secure.rounded import nearest_pair

BITS = st.sampled_from([64, 128, 192])
RATIO = st.floats(2.0**-3, 2.0**43)


def pair(u: Fraction, v: Fraction, ratio: float) -> tuple[mpmath.mpf, mpmath.mpf]:
    """ratio sqrt(-2 ln u) (cos, sin)(2 pi v), by another library and in 200 digits."""
    with mpmath.workdps(200):
        u_, v_ = (mpmath.mpf(x.numerator) / x.denominator for x in (u, v))
        r, t = ratio * mpmath.sqrt(-2 * mpmath.log(u_)), 2 * mpmath.pi * v_
        return r * mpmath.cos(t), r * mpmath.sin(t)


def nearest(y: mpmath.mpf) -> int:
    with mpmath.workdps(200):
        return int(mpmath.floor(y + mpmath.mpf(1) / 2))


@st.composite
def cells(draw: st.DrawFn) -> tuple[int, int, int]:
    """Two uniforms' first bits: any, and those at the ends."""
    bits = draw(BITS)
    top = 2**bits - 1
    end = st.integers(0, min(top, 2**40))
    whole = st.integers(0, top) | end | end.map(lambda n: top - n)
    return draw(whole), draw(whole), bits


@settings(max_examples=150, deadline=None)
@given(cell=cells(), ratio=RATIO, inside=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_what_is_decided_holds_for_every_point_of_the_cell(
    cell: tuple[int, int, int], ratio: float, inside: tuple[float, float]
) -> None:
    u, v, bits = cell
    found = nearest_pair(u, v, bits, ratio)
    at = [Fraction(x) + Fraction(s) for x, s in zip((u, v), inside, strict=True)]
    assume(at[0] > 0)
    values = pair(at[0] / 2**bits, at[1] / 2**bits, ratio)
    for answer, value in zip(found, values, strict=True):
        assert answer is None or answer == nearest(value)


@settings(max_examples=100, deadline=None)
@given(u=st.integers(2**40, 2**128 - 2**40), v=st.integers(0, 2**128 - 1), exponent=st.integers(-2, 30))
def test_128_bits_decide_all_but_a_few(u: int, v: int, exponent: int) -> None:
    ratio = 2.0**exponent
    for answer, value in zip(nearest_pair(u, v, 128, ratio), pair(*cell_middle(u, v, 128), ratio), strict=True):
        with mpmath.workdps(60):
            if abs(value - mpmath.floor(value) - mpmath.mpf(1) / 2) > ratio * 2.0**-30:
                assert answer == nearest(value)


def cell_middle(u: int, v: int, bits: int) -> tuple[Fraction, Fraction]:
    return Fraction(2 * u + 1, 2 ** (bits + 1)), Fraction(2 * v + 1, 2 ** (bits + 1))


def test_a_half_in_the_middle_is_not_decided_and_one_beside_it_is() -> None:
    # cos of a sixth of a circle is 1/2, which lies in the cell of v = (2^64 - 4) / 6; r = 3 is in that of u.
    with mpmath.workdps(50):
        u = int(mpmath.floor(mpmath.mpf(2) ** 64 * mpmath.exp(-mpmath.mpf(9) / 2)))
    v = (2**64 - 4) // 6
    cos, sin = nearest_pair(u, v, 64, 1.0)
    assert cos is None and sin == 3  # 3 / 2 and 2.598
    assert nearest_pair(u, v - 2**20, 64, 1.0)[0] == 2  # a little less of an angle, a little more than 3 / 2
    assert nearest_pair(u, v + 2**20, 64, 1.0)[0] == 1


@pytest.mark.parametrize("inside", [0.02, 0.98])
def test_a_half_near_the_end_of_the_angle_s_cell_is_not_decided(inside: float) -> None:
    u, v = 2**63, 1000
    ratio = float(0.5 / pair(Fraction(1, 2), (v + Fraction(inside)) / 2**64, 1.0)[1])
    assert nearest_pair(u, v, 64, ratio)[1] is None
    assert nearest_pair(u, v - 3, 64, ratio)[1] == 0 and nearest_pair(u, v + 3, 64, ratio)[1] == 1


@pytest.mark.parametrize("bits", [64, 128, 256, 1024])
def test_the_tail_has_no_end(bits: int) -> None:
    assert nearest_pair(0, 2 ** (bits - 3), bits, 1.0) == (None, None)  # U may be as small as it likes
    far = math.sqrt(2 * bits * math.log(2))
    assert far > 9.4
    assert nearest_pair(2**40, 0, bits + 40, 1024.0) == (round(1024 * far), 0)
