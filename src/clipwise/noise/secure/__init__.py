"""`noise="secure"`: Gaussian noise rounded exactly to a grid, from the words of a cipher.

Why. The proof of the Gaussian mechanism is about real numbers, not about floating-point ones. Which values
sum + noise can take in float64 depends on the sum, so the low bits of a release can rule out sums. And a statistical
generator has no proof of secrecy.

What is released. With a grid step g, a power of two, and R(s) the nearest multiples of g, coordinate by coordinate:

    released sum = R(s) + R(N),   N ~ N(0, sigma^2 I),   sigma = z S',   S' = S + g sqrt(d)

for a part with d coordinates and sensitivity S. Later operations (division by a constant, a cast to float32, the
optimizer) are post-processing of the released sum.

Why that is private.

1. R moves each coordinate by at most g / 2, so two neighbouring sums differ after rounding by at most
   |s - s'| + 2 sqrt(d) g / 2 <= S + g sqrt(d) = S'. (Coordinates are clamped to 2^52 g first, which increases no
   distance.)
2. R(s) is on the grid, and rounding commutes with shifts by grid points: R(s) + R(N) = R(R(s) + N) unless N is exactly
   between two grid points, which has probability 0. So the release is a function of R(s) + N: the Gaussian mechanism
   on a sum of sensitivity S', with multiplier sigma / S' = z. Accounting does not change.
3. R(N) is drawn *exactly* (`rounded.py`): N is the Box-Muller transform of two real uniforms with as many bits as
   needed. 64 bits and float64 nearly always suffice, with a proven margin; where N / g is within the margin of a half,
   more bits and decimal arithmetic with more digits decide (`rounded.py`). Every value is possible: the tail has no
   end.
4. The additions are those of whole numbers below 2^53 in float64, which are exact on every device.

g is the largest power of two with g sqrt(d) <= 2^-16 S, so the noise grows by at most 0.0016 %. If that is below 2^-36
of the noise (large multipliers of large parts), g is the largest power of two up to 2^-36 of the noise. S' always uses
the actual g.

What is claimed: the noise has the law of the formula above if the words are uniform. The words are ChaCha20's
(`cipher.py`), with a 256-bit key from the operating system through the ratchet of `noise.NoiseKey`: distinguishing them
from uniform words means breaking ChaCha20 or BLAKE2b. So the guarantee is computational, as with every generator. The
margin assumes that log, sqrt, sin and cos of numpy and torch err by at most 4 units in the last place, as documented
there and tested here.

What is not claimed: that S bounds the sum in floating point (including the rounding of a strategy's scaling). The
strategy states that, with its own rounding bounds, for both kinds of noise. Timing is not covered: the exact path is
slower, and whether it is taken depends on the noise. Sampling of batches and dropout use the same generators as with
standard noise. On a GPU the noise is drawn on the CPU and copied.
"""

from clipwise.noise.secure.cipher import require_cipher
from clipwise.noise.secure.rounded import noised_on_grid, on_grid, rounded_gaussian

__all__ = ["noised_on_grid", "on_grid", "require_cipher", "rounded_gaussian"]
