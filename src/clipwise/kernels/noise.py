"""Normals from a counter: Philox4x32-10 and Box-Muller in float64, one launch for a whole draw.

Pair j of normals is a pure function of j and the key, so a shorter draw is a prefix of a longer one. The key is read on
the device: a captured CUDA graph draws new noise when the key there changes.

The key is 32 bytes as four int64. The first is Philox's 64-bit key, the second the upper half of its counter, with j as
the lower half: 128 bits of secret. The other two are not used. The four 32-bit output words are two 64-bit words
(k, a), low halves first, which give a pair of normals: with k unsigned and a signed,

    u = (k + 1/2) 2^-64,   r = std sqrt(-2 ln u),   t = pi a 2^-63,   the pair r cos t, r sin t.

u is rounded once, in its own binade: the smallest is 2^-65 exactly (r = 9.49 std), and the tail has the full relative
precision of float64; the largest rounds to 1, where r = 0. u is never 0 and never above 1, so no word gives NaN or
infinity. Only the final value is rounded to the requested dtype.

The kernel reduces angles to an eighth of a circle: a = 2^62 q + r, with q the quadrant and |r| <= 2^61, is exact in
integers. For |x| <= pi / 4 the error of the series of cosine and sine is below half a unit of float64 after nine and
eight terms. This takes a third of the time of library functions, which support every angle, and the draw is
compute-bound.

Legend: P pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clipwise.kernels import usable
from clipwise.kernels.launch import Pointer, blocks, constexpr, device_of, jit, tl

# Philox4x32-10, "Parallel random numbers: as easy as 1, 2, 3" (2011): multipliers, and key increments.
ROUNDS = 10
_MULTIPLY_0, _MULTIPLY_2 = 0xD2511F53, 0xCD9E8D57
_GROW_0, _GROW_1 = 0x9E3779B9, 0xBB67AE85

_LOW = 0xFFFFFFFF
_ANGLE = math.pi * 2.0**-63
_BLOCK = 512  # pairs per program
_TWIN_PAIRS = 1 << 21  # pairs that the twin computes at a time: bounds its workspace


def normals(
    key_4: Tensor,
    size: int,
    std: float | Tensor,
    dtype: torch.dtype,
    device: torch.device | None = None,
    onto: Tensor | None = None,
    divisor: float | Tensor = 1.0,
    start: int = 0,
) -> Tensor:
    """`size` independent values of N(0, std^2), flat; with `onto`, (onto + noise) / divisor.

    The sum is fused, so that the noise is never written to memory. Each of the three intermediate values is rounded to
    `dtype`, as if they were separate operations.

    Args:
        key_4: the step's key, int64[4], on the device. Two draws with one key give the same noise.
        size: the number of values.
        std: the standard deviation: a number, which is constant in a captured graph, or float64[1] on the device.
        dtype: torch.float32 or torch.float64.
        device: must be the key's device.
        onto: `size` values of that dtype on that device, contiguous; not modified.
        divisor: likewise a number or a tensor on the device, of dtype `dtype`.
        start: the number of values of the stream to skip.
    """
    if start % 2:  # values come in pairs
        assert onto is None
        return normals(key_4, size + 1, std, dtype, device, start=start - 1)[1:]
    assert key_4.dtype == torch.int64 and key_4.shape == (4,) and key_4.is_contiguous()
    assert dtype in (torch.float32, torch.float64)
    # "cuda" without an index is the current device, and matches any device of the key.
    assert device is None or torch.device(device).type == key_4.device.type
    assert onto is None or (onto.numel() == size and onto.dtype == dtype and onto.is_contiguous())
    if not usable(key_4):
        noise = normals_in_torch(key_4, size, std, dtype, start // 2)
        return noise if onto is None else noise.add_(onto.view(-1)).div_(divisor)
    pairs = blocks(size, 2)
    out = torch.empty(2 * pairs, dtype=dtype, device=key_4.device)
    if pairs:
        # In memory, because Triton passes a float as float32.
        std_1, divisor_1 = _in_memory(std, torch.float64, key_4), _in_memory(divisor, dtype, key_4)
        with device_of(key_4):
            _write_normals[(blocks(pairs, _BLOCK),)](
                *(key_4, std_1, out, out if onto is None else onto, divisor_1, pairs, size, start // 2),
                *(ROUNDS, _MULTIPLY_0, _MULTIPLY_2, _GROW_0, _GROW_1, _ANGLE, onto is not None, _BLOCK),
            )  # fmt: skip
    return out[:size]


def _in_memory(number: float | Tensor, dtype: torch.dtype, beside: Tensor) -> Tensor:
    return number if isinstance(number, Tensor) else torch.full((1,), number, dtype=dtype, device=beside.device)


def normals_in_torch(key_4: Tensor, size: int, std: float | Tensor, dtype: torch.dtype, first_pair: int = 0) -> Tensor:
    """The twin of `normals`: the same words, so the same values up to the last bits of log, cos and sin."""
    pairs = blocks(size, 2)
    out_P2 = torch.empty(pairs, 2, dtype=dtype, device=key_4.device)
    key, upper = _halves(key_4[0]), _halves(key_4[1])
    for start in range(0, pairs, _TWIN_PAIRS):
        j_P = torch.arange(start, min(start + _TWIN_PAIRS, pairs), device=key_4.device)
        words = philox((*_halves(j_P + first_pair), *(half.expand_as(j_P) for half in upper)), key)
        k_P, a_P = words[0] | (words[1] << 32), words[2] | (words[3] << 32)
        out_P2[start : start + len(j_P)] = pairs_from_words(k_P, a_P, std)
    return out_P2.view(-1)[:size]


def pairs_from_words(k_P: Tensor, a_P: Tensor, std: float | Tensor) -> Tensor:
    """Box-Muller as above, from int64 words (k as unsigned bits, a as signed value): [P, 2] in float64."""
    u_P = (k_P.view(torch.uint64).double() + 0.5) * 2.0**-64
    r_P, t_P = torch.sqrt(-2 * torch.log(u_P)) * std, a_P.double() * _ANGLE
    return torch.stack([torch.cos(t_P) * r_P, torch.sin(t_P) * r_P], 1)


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four words from a counter of four and a key of two. A word is an int64 below 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # The products need 64 bits: int64 wraps, and keeps all of them.
        p0, p2 = _halves(c0 * _MULTIPLY_0), _halves(c2 * _MULTIPLY_2)
        c0, c1, c2, c3 = p2[1] ^ c1 ^ k0, p2[0], p0[1] ^ c3 ^ k1, p0[0]
        k0, k1 = (k0 + _GROW_0) & _LOW, (k1 + _GROW_1) & _LOW
    return c0, c1, c2, c3


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The low and the high 32 bits of an int64. (The mask removes the sign that its right shift copies.)"""
    return x & _LOW, (x >> 32) & _LOW


@jit
def _write_normals(
    key: Pointer, std: Pointer, out: Pointer, onto: Pointer, divisor: Pointer,
    pairs: int, size: int, first_pair: int,
    ROUNDS: constexpr, MULTIPLY_0: constexpr, MULTIPLY_2: constexpr, GROW_0: constexpr, GROW_1: constexpr,
    ANGLE: constexpr, ADD: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Pairs BLOCK * program ... of the draw, stored contiguously; or the sums with them, divided."""
    j_P = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    secret = tl.load(key).to(tl.uint64, bitcast=True)
    upper = tl.load(key + 1).to(tl.uint64, bitcast=True)
    k0, k1 = secret.to(tl.uint32), (secret >> 32).to(tl.uint32)
    at_P = j_P + first_pair
    c0, c1 = at_P.to(tl.uint32), (at_P >> 32).to(tl.uint32)
    c2 = tl.zeros([BLOCK], tl.uint32) + upper.to(tl.uint32)
    c3 = tl.zeros([BLOCK], tl.uint32) + (upper >> 32).to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        p0 = c0.to(tl.uint64) * MULTIPLY_0
        p2 = c2.to(tl.uint64) * MULTIPLY_2
        c0 = (p2 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = p2.to(tl.uint32), p0.to(tl.uint32)
        k0 = (k0.to(tl.uint64) + GROW_0).to(tl.uint32)  # modulo 2^32
        k1 = (k1.to(tl.uint64) + GROW_1).to(tl.uint32)
    k_P = c0.to(tl.uint64) | (c1.to(tl.uint64) << 32)
    a_P = (c2.to(tl.uint64) | (c3.to(tl.uint64) << 32)).to(tl.int64, bitcast=True)
    u_P = (k_P.to(tl.float64) + 0.5) * 5.421010862427522e-20  # 2^-64
    r_P = tl.sqrt(-2.0 * tl.log(u_P)) * tl.load(std)
    quarters_P = (a_P + (1 << 61)) >> 62  # modulo 4: the sum may wrap around
    x_P = (a_P - (quarters_P << 62)).to(tl.float64) * ANGLE
    cos_P, sin_P = _series(x_P)
    is_odd = (quarters_P & 1) != 0
    across_P, up_P = tl.where(is_odd, sin_P, cos_P), tl.where(is_odd, cos_P, sin_P)
    # Over the quarters 0, 1, 2, 3 the pair is (c, s), (-s, c), (-c, -s), (s, -c).
    across_P = tl.where(((quarters_P + 1) & 2) != 0, -across_P, across_P)
    up_P = tl.where((quarters_P & 2) != 0, -up_P, up_P)
    pair_P2 = tl.join(across_P * r_P, up_P * r_P)
    at_P2 = 2 * j_P[:, None] + tl.arange(0, 2)[None, :]
    value_P2 = pair_P2.to(out.dtype.element_ty)
    if ADD:  # the second half of the last pair may be unused
        value_P2 = (value_P2 + tl.load(onto + at_P2, mask=at_P2 < size, other=0.0)) / tl.load(divisor)
    tl.store(out + at_P2, value_P2, mask=(j_P < pairs)[:, None])


@jit
def _series(x: Pointer) -> Pointer:
    """Cosine and sine of |x| <= pi / 4 in float64, up to x^16 / 16! and x^15 / 15!."""
    y = x * x
    cos = y * (1 / 20922789888000) - 1 / 87178291200
    cos = cos * y + 1 / 479001600
    cos = cos * y - 1 / 3628800
    cos = cos * y + 1 / 40320
    cos = cos * y - 1 / 720
    cos = cos * y + 1 / 24
    cos = cos * y - 1 / 2
    cos = cos * y + 1
    sin = y * (-1 / 1307674368000) + 1 / 6227020800
    sin = sin * y - 1 / 39916800
    sin = sin * y + 1 / 362880
    sin = sin * y - 1 / 5040
    sin = sin * y + 1 / 120
    sin = sin * y - 1 / 6
    return cos, x + x * y * sin
