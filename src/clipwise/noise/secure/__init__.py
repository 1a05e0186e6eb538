"""`noise="secure"`: a Gaussian that is rounded to a grid, exactly, and made of a cipher's words.

Why. A float that was computed as sum + noise is not what the proof speaks of. Which values a float64 sampler can
give at all, and what the addition does to their last bits, depends on the sum: the low bits of a
release can rule sums out. And a statistical generator is secret by habit only.

What is released. With a grid step g, a power of two, and R(s) the nearest multiples of g, coordinate by coordinate:

    released sum = R(s) + R(N),   N ~ N(0, sigma^2 I),   sigma = z S',   S' = S + g sqrt(d)

for a part of d coordinates and of sensitivity S. Everything after it (the division by a constant, a cast to float32,
the optimizer) is a function of the released sum and of nothing private.

Why that is private.

1. R moves each coordinate by at most g / 2, so two neighbouring sums differ after it by at most
   |s - s'| + 2 sqrt(d) g / 2 <= S + g sqrt(d) = S'. (Coordinates are clamped to 2^52 g first. That brings no two sums
   further apart.)
2. R(s) is on the grid, and rounding commutes with steps of the grid: R(s) + R(N) = R(R(s) + N) unless N lies just
   between two points of the grid, which has probability 0. So what is released is a function of R(s) + N: the
   Gaussian mechanism on a sum of sensitivity S', with multiplier sigma / S' = z. Accounting stays what it is.
3. R(N) is drawn *exactly*, not to some precision (`rounded.py`): N is the Box-Muller transform of two real uniforms
   of as many bits as it takes. 64 bits and float64 decide nearly always, with a proven margin; where N / g is within
   the margin of a half, more bits and decimal arithmetic of as many digits decide (`exact.py`). No value is out of
   reach: the tail has no end.
4. The additions are those of whole numbers below 2^53 in float64, which are exact on every device.

g is the largest power of two with g sqrt(d) <= 2^-16 S, so the noise grows by 0.0016 % at most. Only where that is
finer than 2^-36 of the noise (large multipliers of large parts) it is the largest below 2^-36 of the noise; S' is
stated and noised for the g that is used.

What is claimed: the law of the noise is that of the formula above if the words are uniform. They are ChaCha20's
(`cipher.py`), under a key of 256 bits that came from the operating system through the ratchet of `noise.NoiseKey`:
to tell them from uniform ones is to break ChaCha20 or BLAKE2b. That makes the guarantee computational, as with every
generator. The margin takes log, sqrt, sin and cos of numpy and torch to be within 4 units of the last place, as those
state and tests look at.

What is not claimed: that S bounds the sum in floating point (and, where a strategy scales its sum, what the scaling
rounds). That is the strategy's statement, with its own bounds on rounding; it holds for both kinds of noise. Nor is
time covered: the rare long way round takes longer, and when it is taken depends on the noise. Who is in a batch, and
the noise of dropout, come from the generators that they always come from. On a GPU the noise is still drawn on the
CPU, and moved.
"""

from clipwise.noise.secure.cipher import require_cipher
from clipwise.noise.secure.grid import noised_on_grid, on_grid
from clipwise.noise.secure.rounded import rounded_gaussian

__all__ = ["noised_on_grid", "on_grid", "require_cipher", "rounded_gaussian"]
