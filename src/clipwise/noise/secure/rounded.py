"""Secure noise: its grid, and the rounded Gaussian, whole numbers K = round(ratio X) with X ~ N(0, 1), drawn exactly.

X comes in pairs, by Box-Muller from two real uniforms with the words k and a as their first 64 bits:

    U in (k, k + 1) 2^-64,   t in pi (a, a + 1) 2^-63,   r = sqrt(-2 ln U),   the pair r cos t, r sin t

with k unsigned and a signed. From the words, float64 computes y near ratio X. Let e = 2^-53, and let log, sin and cos
err by at most 8 e of their value (4 units of the last place). Then

    |Δ ln U|    <= e + 1/k + 8 e |ln U|                      the conversion of k; the bits after it; log
    |Δ r|       <= 2 |Δ ln U| / r + 2 e r                    as r^2 = -2 ln U
    |Δ cos t|   <= 3 pi e + pi 2^-63 + 8 e                   three roundings; the bits after a; cos
    |y - ratio X| / ratio  <=  36 e r + (2 e + 2/k) / r      first order, and the last two products

and `margin` is ratio (64 e r + (8 e + 4/k) / r), nearly twice that. If y is further than this from the midpoint between
two whole numbers, its nearest whole number is K. If not (a few in a million values), or if k = 0, `nearest_pair`
decides, with further words of this pair.

There Box-Muller has as many digits as needed. A uniform with known first n bits is a real number in (u, u + 1) 2^-n.
Together with an angle of n bits it gives a pair of intervals. If all values of an interval have the same nearest whole
number, that is the result for all further bits. Each further bit halves the interval.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from decimal import ROUND_HALF_EVEN, Context, Decimal, getcontext, localcontext
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipwise.noise.gaussian import buckets, by_all_threads, taken_from
from clipwise.noise.key import KEY_BYTES
from clipwise.noise.secure.cipher import Words, words
from clipwise.privacy import Part

FINER_THAN_SENSITIVITY = 2.0**-16
COARSER_THAN_NOISE = 2.0**-36  # a finer grid would need the slow exact path too often
LARGEST = 2.0**52  # grid steps; well within the exact whole numbers of float64

Draw = Callable[[int, int], Tensor]  # (bucket number, size) -> whole numbers in float64


def grid_step(sensitivity: float, noise_std: float, size: int) -> float:
    """The largest power of two g with g sqrt(d) <= 2^-16 S; or g <= 2^-36 sigma, where that is more.

    An empty part (d = 0) gets the step of d = 1.
    """
    limit = max(FINER_THAN_SENSITIVITY * sensitivity / math.sqrt(max(size, 1)), COARSER_THAN_NOISE * noise_std)
    _, exponent = math.frexp(limit)  # limit = m 2^exponent, m in [1/2, 1)
    return math.ldexp(0.5, exponent)


def on_grid(parts: Sequence[Part], sizes: Mapping[str, int]) -> tuple[Part, ...]:
    """The same parts on grids, with the same multiplier: S' = S + g sqrt(d), and noise in proportion.

    `sizes` is the number of coordinates of each parameter, and of each part without parameters.
    """
    return tuple(_on_grid(p, sum(sizes[name] for name in p.parameters or (p.name,))) for p in parts)


def _on_grid(part: Part, size: int) -> Part:
    if part.noise_std == 0:
        return part
    step = grid_step(part.sensitivity, part.noise_std, size)
    up = 1 + 2.0**-40  # so that no rounding here makes the noise smaller than stated
    sensitivity = (part.sensitivity + step * math.sqrt(size)) * (1 + 2.0**-50)
    std = part.noise_std * (sensitivity / part.sensitivity if part.sensitivity > 0 else 1.0) * up
    return replace(part, sensitivity=sensitivity, noise_std=std, grid=step)


@torch.no_grad()
def noised_on_grid(
    sums: list[Tensor], draw: Draw, divisor: float, step: float, scales: Sequence[float] = ()
) -> list[Tensor]:
    """(R(sum) + noise) / divisor of each, with R the nearest multiple of the step, and scales as in `release.noised`.

    Everything before the division is exact: whole numbers of steps in float64. Removes the sums from the list, so that
    their memory is freed early.
    """
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in sums) else torch.float32
    multipliers = list(scales) or [1.0] * len(sums)
    found: list[Tensor] = []
    for number, count in enumerate(buckets([t.numel() for t in sums])):
        bucket = [sums.pop(0) for _ in range(count)]
        noise = draw(number, sum(t.numel() for t in bucket)).to(bucket[0].device)
        pieces = torch.split(noise, [t.numel() for t in bucket])
        for piece, total in zip(pieces, bucket, strict=True):
            m = multipliers[len(found)]
            # m / g is not rounded, since g is a power of two.
            steps = total.double().mul_(m / step).clamp_(-LARGEST, LARGEST).round_().add_(piece.view_as(total))
            found.append(steps.div_(divisor / step).div_(m).to(dtype))
    return found


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


Reals = npt.NDArray[np.float64]

# Uses of a key's words: one stream per chunk for radii and for angles, one per pair for further bits.
_RADII, _ANGLES, _FURTHER = 0, 1, 2

# Pairs per chunk: torch would distribute more than 32768 numbers over its own threads. Another size gives other noise
# from the same key.
_CHUNK = 1 << 14

_UNIT = 2.0**-53
_ANGLE = math.pi * 2.0**-63


def rounded_gaussian(key: bytes, size: int, ratio: float) -> Tensor:
    """`size` independent values round(ratio X), X ~ N(0, 1), as whole numbers in float64 on the CPU.

    A pure function of its arguments, for any number of threads. A shorter draw is the beginning of a longer one.

    Args:
        key: 32 bytes from `NoiseKey.derive`. Two draws from one key are the same noise.
        size: the number of values.
        ratio: standard deviation over grid step, below 2^44 so that the numbers stay exact.
    """
    assert len(key) == KEY_BYTES and size >= 0 and 0 < ratio < 2.0**44
    drawn = torch.empty(size, dtype=torch.float64)
    starts = deque(range(0, size, 2 * _CHUNK))
    by_all_threads(starts, partial(_draw_chunks, key, drawn.numpy(), ratio))
    return drawn


def _draw_chunks(key: bytes, drawn: Reals, ratio: float, starts: deque[int]) -> None:
    for start in taken_from(starts):
        _draw_chunk(key, start // (2 * _CHUNK), drawn[start : start + 2 * _CHUNK], ratio)


def _draw_chunk(key: bytes, chunk: int, drawn: Reals, ratio: float) -> None:
    pairs = (len(drawn) + 1) // 2
    k_P, a_P = words(key, _RADII, chunk, pairs), words(key, _ANGLES, chunk, pairs)
    with np.errstate(divide="ignore", invalid="ignore"):  # k = 0
        r_P, margin_P = _radii(k_P, ratio)
        t_P = torch.from_numpy(a_P.view(np.int64) * _ANGLE)
        in_doubt = set()
        for side, function in enumerate((torch.cos, torch.sin)):
            y_P = function(t_P).numpy()
            y_P *= r_P
            nearest_P = np.rint(y_P)
            distance_P = np.abs(np.subtract(y_P, nearest_P, out=y_P), out=y_P)
            distance_P += margin_P
            in_doubt.update(np.flatnonzero(~(distance_P < 0.5)).tolist())  # NaN too
            drawn[side::2] = nearest_P[: len(drawn[side::2])]
    for pair in in_doubt:
        exact = _decide(key, chunk * _CHUNK + pair, int(k_P[pair]), int(a_P[pair]), ratio)
        drawn[2 * pair : 2 * pair + 2] = exact[: len(drawn) - 2 * pair]


def _radii(k_P: Words, ratio: float) -> tuple[Reals, Reals]:
    """ratio * r, and the margin of ratio * X."""
    u_P = k_P * 2.0**-64
    r_P = np.abs(np.log(u_P))  # abs also clears the sign of a zero, which would make the margin -inf
    r_P *= 2
    np.sqrt(r_P, out=r_P)
    margin_P = np.divide(ratio * 4 * 2.0**-64, u_P, out=u_P)  # 4 / k
    margin_P += ratio * 8 * _UNIT
    margin_P /= r_P
    r_P *= ratio
    margin_P += r_P * (64 * _UNIT)
    return r_P, margin_P


def _decide(key: bytes, pair: int, k: int, a: int, ratio: float) -> tuple[int, int]:
    """The rounded pair, from as many bits of its uniforms as needed."""
    first, second = nearest_pair(k, a, 64, ratio)
    bits = 64
    while first is None or second is None:
        # Further words of this pair come two at a time, one for each uniform.
        more_k, more_a = words(key, _FURTHER, pair, bits // 32)[-2:].tolist()
        k, a, bits = k << 64 | more_k, a << 64 | more_a, bits + 64
        first, second = nearest_pair(k, a, bits, ratio)
    return first, second
