"""Box-Muller with as many digits as needed: the nearest whole number of a value that float64 cannot decide.

A uniform with known first n bits is a real number in (u, u + 1) 2^-n. Together with an angle of n bits it gives a pair
of intervals. If all values of an interval have the same nearest whole number, that is the result for all further bits.
Each further bit halves the interval.
"""

from __future__ import annotations

import math
from decimal import ROUND_HALF_EVEN, Context, Decimal, getcontext, localcontext
from functools import lru_cache

_GUARD = 40  # digits beyond those that represent u 2^-bits exactly; the last 20 absorb rounding


def nearest_pair(u: int, v: int, bits: int, ratio: float) -> tuple[int | None, int | None]:
    """The whole numbers nearest to ratio r cos t and ratio r sin t; None where the bits do not decide.

        r = sqrt(-2 ln U),  U in (u, u + 1) 2^-bits;    t = 2 pi V,  V in (v, v + 1) 2^-bits.

    Args:
        u: the first bits of U, a whole number.
        v: the first bits of V, modulo 2^bits.
        bits: the number of bits of each.
        ratio: the factor of the normal, taken as the exact value of the float.
    """
    if u == 0:
        return None, None  # U may be arbitrarily small
    with localcontext(Context(prec=bits + _GUARD, rounding=ROUND_HALF_EVEN, Emax=10**6, Emin=-(10**6))):
        scale = Decimal(5**bits).scaleb(-bits)  # 2^-bits
        shortest, longest = (_radius(Decimal(end) * scale) for end in (u + 1, u))
        # The ends of the angle's interval are pi 2^-bits from its middle.
        cos, sin = _cos_sin(2 * v + 1, bits + 1)
        width, factor = 4 * scale, Decimal(ratio)
        return (
            _nearest(shortest, longest, cos - width, cos + width, factor),
            _nearest(shortest, longest, sin - width, sin + width, factor),
        )


def _radius(u: Decimal) -> Decimal:
    """sqrt(-2 ln u). Decimal's functions round correctly."""
    return (-2 * u.ln()).sqrt() if u < 1 else Decimal(0)


def _nearest(shortest: Decimal, longest: Decimal, low: Decimal, high: Decimal, ratio: Decimal) -> int | None:
    products = [radius * side * ratio for radius in (shortest, longest) for side in (low, high)]
    # A few roundings of relative size up to 10^(1 - digits) each; sine and cosine err by 10^(3 - digits).
    rounding = (longest + 1) * ratio * Decimal(1).scaleb(_GUARD // 2 - getcontext().prec)
    half = Decimal("0.5")
    first = math.floor(min(products) - rounding + half)
    last = math.floor(max(products) + rounding + half)
    return first if first == last else None


def _cos_sin(v: int, bits: int) -> tuple[Decimal, Decimal]:
    """Cosine and sine of 2 pi v 2^-bits, by their series, reduced to an eighth of a circle."""
    circle = 1 << bits
    quarters = (4 * v + circle // 2) // circle
    rest = 4 * v - quarters * circle  # at most half a quarter, exactly
    x = Decimal(rest) * _pi(getcontext().prec) / (2 * Decimal(circle))
    cos, sin = _series(x)
    return ((cos, sin), (-sin, cos), (-cos, -sin), (sin, -cos))[quarters % 4]


def _series(x: Decimal) -> tuple[Decimal, Decimal]:
    """cos x = sum_n (-1)^n x^2n / (2n)! and sin x, up to negligible terms."""
    cos, sin, term, n = Decimal(1), x, x, 1
    least = Decimal(1).scaleb(-getcontext().prec - 5)
    while abs(term) > least:
        term = -term * x / (n + 1)  # the cosine's: (-1)^m x^2m / (2m)!
        cos += term
        term = term * x / (n + 2)
        sin += term
        n += 2
    return cos, sin


@lru_cache(maxsize=8)
def _pi(digits: int) -> Decimal:
    """pi = 16 arctan(1/5) - 4 arctan(1/239), in integer multiples of 10^-(digits + 10)."""
    one = 10 ** (digits + 10)

    def arctan_of_one_over(x: int) -> int:
        power, total, n = one // x, 0, 0
        while power:
            total += (power if n % 2 == 0 else -power) // (2 * n + 1)
            power //= x * x
            n += 1
        return total

    return Decimal(16 * arctan_of_one_over(5) - 4 * arctan_of_one_over(239)) / Decimal(one)
