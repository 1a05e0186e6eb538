"""Standard normals from 64-bit words, exact to the end of the tail, in a few vectorised passes over memory.

The density phi is the sum of two parts (Marsaglia's rectangle-wedge-tail method):

    boxes    under the curve, one on each of the strips [j h, (j + 1) h) in |x| < R. A box has the mass n_j 2^-14 with a
             whole number n_j, the largest for which it lies under the curve. Together they have 98% of the mass.
    the rest phi - boxes: the area between the boxes and the curve, and the two tails |x| > R.

One word gives one value: its upper 14 bits choose one of 2^14 entries of a table, n_j of which are strip j, and its
lower 50 bits are the place in the strip. The remaining entries select a value of the rest, which comes from a second
stream by rejection. A proposal takes two words. The upper 12 bits of the first choose a strip or a tail with
probability m_k 2^-12, in proportion to an upper bound of its mass in the rest; the lower 52 bits are the place in it.

    strip    accepted if its height above the box, uniform up to the bound (53 bits, from the second word), is below phi
    tail     x = -+ Phi^-1(Phi(-R) U), accepted with the ratio of its mass to the bound

So values have the exact normal law up to the resolution of float64, and are spaced by at most 2^-51 where |x| < R. The
tail ends at 9.6, where U has its smallest value; the probability beyond is below 1e-21.

Value i is a function of word i and of the rest, in order. So a shorter draw is the beginning of a longer one.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri

Reals = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]

EDGE = 4.5  # R
STRIPS = 64  # 1 / h: strips per unit
TABLE_BITS, REST_BITS = 14, 12

_STEP = 1 / STRIPS
_ONE = np.uint64(0x3FF << 52)  # the bits of the float 1.0
_ACCEPTED = 0.7  # of the proposals, about


def _density(x: Reals) -> Reals:
    return np.asarray(np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi))


def _boxes() -> tuple[Reals, Reals, npt.NDArray[np.int64]]:
    """Left end and height of each box, and its number of entries."""
    left = np.arange(-EDGE * STRIPS, EDGE * STRIPS) / STRIPS
    below = np.minimum(_density(left), _density(left + _STEP)) * (1 - 2.0**-40)  # no rounding makes it too high
    counts = np.floor(below * _STEP * 2**TABLE_BITS).astype(np.int64)
    return left, counts / (_STEP * 2**TABLE_BITS), counts


def _table() -> Reals:
    """For each entry the left end of its strip, less h; NaN selects a value of the rest."""
    left, _, counts = _boxes()
    table = np.full(2**TABLE_BITS, np.nan)
    table[: counts.sum()] = np.repeat(left - _STEP, counts)
    return table


def _rest() -> tuple[Reals, Reals, Reals, float]:
    """For each entry of the rest: left end less h, box, height of the proposals above it; and the tails' probability.

    The first two entries are the tails. Entries that are left over are never accepted.
    """
    left, low, _ = _boxes()
    high = np.maximum(_density(left), _density(left + _STEP)) * (1 + 2.0**-40)
    tail = float(ndtr(-EDGE))
    masses = np.concatenate([[tail, tail], (high - low) * _STEP])
    per_mass = (2**REST_BITS - len(left) / 2) / masses.sum()
    while (counts := np.ceil(masses * per_mass).astype(np.int64)).sum() > 2**REST_BITS:
        per_mass *= 0.999
    assert counts[0] == counts[1] == 1
    size = counts.sum()
    table = np.zeros((3, 2**REST_BITS))
    table[1, size:] = np.inf
    strips = np.repeat(np.arange(len(left)), counts[2:])
    table[:, 2:size] = left[strips] - _STEP, low[strips], (counts[2:] / (per_mass * _STEP))[strips]
    return *table, tail * per_mass


_LEFT = _table()
_REST_LEFT, _REST_LOW, _REST_HEIGHT, _TAIL_ACCEPTED = _rest()


def fill(values: Reals, workspace: Words, words: np.random.BitGenerator, rest: np.random.BitGenerator) -> None:
    """Fill an array with standard normals.

    Args:
        values: the array, contiguous.
        workspace: of that length; it is overwritten. Fresh memory would take longer than the arithmetic.
        words: gives one word for each value.
        rest: gives the words of the rest.
    """
    drawn: Words = words.random_raw(len(values))
    entry = np.right_shift(drawn, np.uint64(64 - TABLE_BITS), out=workspace)
    np.take(_LEFT, entry.view(np.int64), out=values, mode="clip")
    values += _offset(drawn, TABLE_BITS)
    missing = np.flatnonzero(np.isnan(values))
    done = 0
    while done < len(missing):
        found = rest_of(rest.random_raw(2 * math.ceil((len(missing) - done) / _ACCEPTED + 8)))
        places = missing[done : done + len(found)]
        values[places] = found[: len(places)]
        done += len(places)


def rest_of(words: Words) -> Reals:
    """The accepted values among the proposals of some words, two for each."""
    first, second = np.ascontiguousarray(words.reshape(-1, 2).T)
    entry = (first >> np.uint64(64 - REST_BITS)).view(np.int64)
    height = (second >> np.uint64(11)) * 2.0**-53
    is_tail = np.flatnonzero(entry < 2)
    outside = ((first[is_tail] << np.uint64(REST_BITS) >> np.uint64(REST_BITS)) + 0.5) * 2.0 ** (REST_BITS - 64)
    x = _offset(first, REST_BITS) + _REST_LEFT[entry]
    accepted = height * _REST_HEIGHT[entry] + _REST_LOW[entry] < _density(x)
    x[is_tail] = ndtri(outside * ndtr(-EDGE)) * (1 - 2 * entry[is_tail])
    accepted[is_tail] = height[is_tail] < _TAIL_ACCEPTED
    return np.asarray(x[accepted])


def _offset(words: Words, used: int) -> Reals:
    """h (1 + U), with U in [0, 1) made of the bits below the `used` upper ones. Overwrites the words."""
    words <<= np.uint64(used)
    words >>= np.uint64(12)
    words |= _ONE
    offset = words.view(np.float64)
    offset *= _STEP
    return offset
