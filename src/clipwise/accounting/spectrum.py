"""Fourier transforms of distributions on a circle, with a proven bound on what rounding does to them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from clipwise.accounting.gaussian import Array

UNIT_ROUNDOFF = 2.0**-53
# For the rounding of the bounds themselves.
ROOM = 1.01


class Spectrum:
    """The Fourier transform of a sum of positions on a circle, with a bound on its error.

    Each output of an FFT is a sum of its n inputs in a tree about log2(n) high, and each level leaves an error of
    a few u times the sum of their absolute values, which is 1 here: |error| <= e = 8 u log2(n).
    With A = |computed| + e a product of T factors is off by at most the product of all A times sum e / A + 4 u T,
    for the errors of the factors and of multiplying them. The way back averages that over the frequencies, so
    the bound is small where spectra fade, as those of many steps do.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._rounding = 8 * UNIT_ROUNDOFF * math.log2(size + 2) * ROOM
        self._values = np.ones(size // 2 + 1, dtype=np.complex128)
        self._largest = np.ones(size // 2 + 1)
        self._error = np.zeros(size // 2 + 1)

    def multiply(self, masses: Array, count: int) -> None:
        """Add `count` more losses of this distribution to the sum."""
        transformed = fft.rfft(masses, self._size)
        largest = np.abs(transformed) + self._rounding
        self._values *= _power(transformed, count)
        self._largest *= _power(largest, count)
        self._error += count * (self._rounding / largest + 4 * UNIT_ROUNDOFF)

    def masses(self, origin: int) -> Array:
        """The masses of the positions from `origin` on, rounded up."""
        error = ROOM * self._largest * (self._error + self._rounding)
        rounding = 2 * float(error.sum()) / self._size
        found: Array = np.maximum(fft.irfft(self._values, self._size), 0.0) + rounding
        return np.roll(found, -(origin % self._size))


def _power(base: NDArray[Any], exponent: int) -> NDArray[Any]:
    """base ** exponent by squaring: exponent - 1 roundings in all, where logarithms would promise nothing."""
    base = base.copy()
    while not exponent & 1:
        base *= base
        exponent >>= 1
    result: NDArray[Any] = base.copy()
    while exponent := exponent >> 1:
        base *= base
        if exponent & 1:
            result *= base
    return result
