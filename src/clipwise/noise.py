"""Tail-exact Gaussian noise, and the secret that it comes from.

A Gaussian mechanism promises a density on the whole real line. A sampler that stops early breaks the
promise: `torch.randn` in float32 is built from 24-bit uniforms and never passes 5.8 standard deviations,
so a neighbour's release can fall where the other data set cannot put it. Here every pair of normals is
made from two full 64-bit words by Box-Muller in float64 and reaches 9.49 standard deviations; what is
cut off beyond has probability below 3e-21. Only the finished value is rounded to the asked dtype.

What is *not* claimed: values are floating-point numbers, so the low bits of a noised sum are those of
rounded real arithmetic, and Philox is a statistical generator, not a proven cipher.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipwise.errors import ConfigurationError, StepError

KEY_BYTES = 32

# Words in one piece of work: large enough to hide the cost of a call, small enough for the cache (CPU)
# or for the memory beside a model (CUDA: 32 MiB of words and 48 MiB of workspace).
_CPU_CHUNK = 1 << 18
_CUDA_CHUNK = 1 << 22

# Threads that draw words on the CPU: this many keep up with the arithmetic on any number of cores.
_DRAWERS = 4


class NoiseKey:
    """The secret of a run: a forward-secure ratchet that serves one step at a time.

    All hashing is BLAKE2b with a 32-byte digest, keyed with the current secret k_t; `person` separates
    the uses:

        step key   k_{t+1} = BLAKE2b(key=k_t, person="clipwise.advance", data="")
        sub-key            = BLAKE2b(key=k_t, person="clipwise.derive",  data=label)
        from seed  k_0     = BLAKE2b(         person="clipwise.seed",    data=seed ":" context)

    `advance` overwrites k_t in place. Whoever later reads the object, or the resume file that
    `secret_bytes` is written to, cannot get back to k_t, and so not to noise that was already released.
    (Sub-keys are ordinary bytes: Python frees them, but does not erase them from memory.)

    A key cannot be pickled, deep-copied or saved by torch: one that lands in a checkpoint undoes the
    privacy of every step after it.
    """

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        # All zeros is what `wipe` leaves behind: never a secret.
        if not isinstance(secret, bytes) or len(secret) != KEY_BYTES or not any(secret):
            raise ConfigurationError(
                f"secret must be {KEY_BYTES} bytes that are not all zero: use NoiseKey.fresh() or from_seed(...)."
            )
        self._secret = bytearray(secret)

    @classmethod
    def fresh(cls) -> NoiseKey:
        """A key from the operating system's randomness: the one to use."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def from_seed(cls, seed: int, context: bytes) -> NoiseKey:
        """A reproducible key. The noise is then only as secret as the seed.

        `context` is a fingerprint of configuration and data. The same noise on two different sums
        reveals their difference, so the same seed must not give the same noise to another run.
        """
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ConfigurationError("seed must be an int: give a whole number, or no seed at all.")
        # Decimal digits end at the colon, so (seed, context) -> data is one to one.
        data = f"{seed}:".encode() + context
        return cls(blake2b(data, digest_size=KEY_BYTES, person=b"clipwise.seed").digest())

    @classmethod
    def from_secret_bytes(cls, secret: bytes) -> NoiseKey:
        """The inverse of `secret_bytes`."""
        return cls(secret)

    def secret_bytes(self) -> bytes:
        """The secret itself, for the resume file that only its owner can read, and for nothing else."""
        return bytes(self._current())

    def derive(self, label: str) -> bytes:
        """The 32-byte sub-key of this step for one use, such as `"noise/0"` or `"sampling"`."""
        return self._hash(b"clipwise.derive", label.encode())

    def advance(self) -> None:
        """Go to the next step; the old secret is overwritten."""
        self._current()[:] = self._hash(b"clipwise.advance", b"")

    def copy(self) -> NoiseKey:
        """An independent key at the same step, for a reader that runs ahead."""
        return NoiseKey(self.secret_bytes())

    def wipe(self) -> None:
        """Overwrite the secret. The key refuses to work afterwards, rather than give predictable noise."""
        self._secret[:] = bytes(KEY_BYTES)

    def _current(self) -> bytearray:
        if not any(self._secret):
            raise StepError("this NoiseKey was wiped and holds no secret: make a new one.")
        return self._secret

    def _hash(self, person: bytes, data: bytes) -> bytes:
        return blake2b(data, digest_size=KEY_BYTES, key=self._current(), person=person).digest()

    def __repr__(self) -> str:
        return "NoiseKey(<secret>)"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a NoiseKey cannot be pickled, copied by `copy` or saved by torch: it would put the noise's "
            "secret into a file. Use NoiseKey.copy(), or secret_bytes() for a private resume file."
        )


def gaussian(
    key: bytes,
    size: int,
    std: float,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`size` independent values of N(0, std^2), a pure function of `key`.

    On the CPU the result depends on nothing else: not on the number of threads, and a shorter draw is
    the beginning of a longer one, so how a flat buffer is cut afterwards does not matter. On CUDA the
    words come from torch's own generator (`_cuda_words`), and the result also depends on `size` and on
    the device. Other devices get the CPU's values.

    Args:
        key: 32 bytes from `NoiseKey.derive`. Two draws from one key are the same noise.
        size: how many values.
        std: the standard deviation.
        device: where the values are wanted.
        dtype: float32 or float64. Noise is never less precise than float32: for parameters of a lower
            precision, add it in float32 and round the noised sum.
    """
    if len(key) != KEY_BYTES:
        raise ConfigurationError(f"key must be {KEY_BYTES} bytes: take it from NoiseKey.derive(label).")
    if size < 0:
        raise ConfigurationError("size must not be negative.")
    if not (math.isfinite(std) and std >= 0):
        raise ConfigurationError("std must be a finite number that is not negative.")
    if dtype not in (torch.float32, torch.float64):
        raise ConfigurationError(
            f"dtype={dtype} is not possible for noise: draw it in torch.float32 or torch.float64, add it, "
            "and round the noised sum."
        )
    target = torch.device(device)
    on_cuda = target.type == "cuda"
    maker, chunk = (target, _CUDA_CHUNK) if on_cuda else (torch.device("cpu"), _CPU_CHUNK)
    even = size + size % 2  # normals come in pairs
    noise = torch.empty(even, dtype=dtype, device=maker)
    workspace = torch.empty(3, min(even, chunk) // 2, dtype=torch.float64, device=maker)
    pieces = _cuda_words(key, even, maker) if on_cuda else _cpu_words(key, even)
    for start, words in zip(range(0, even, chunk), pieces, strict=True):
        _write_normals(noise[start : start + chunk], words, std, workspace[:, : words.numel() // 2])
    return noise[:size].to(target)


def normals_from_words(words: Tensor | npt.NDArray[np.uint64]) -> Tensor:
    """Standard normals in float64, two from every two 64-bit words: a pure function.

    Args:
        words: an even number of uniform words, int64 or uint64 (the bits count, not the sign). Word 2j
            gives the radius of pair j and word 2j + 1 its angle; see `_write_normals`.
    """
    if isinstance(words, np.ndarray):
        words = torch.from_numpy(words.view(np.int64))
    if words.dtype not in (torch.int64, torch.uint64) or words.dim() != 1 or words.numel() % 2:
        raise ConfigurationError("words must be a flat, even number of 64-bit integers.")
    normals = torch.empty(words.numel(), dtype=torch.float64, device=words.device)
    workspace = torch.empty(3, words.numel() // 2, dtype=torch.float64, device=words.device)
    _write_normals(normals, words.view(torch.int64), 1.0, workspace)
    return normals


def _write_normals(out: Tensor, words: Tensor, std: float, workspace: Tensor) -> None:
    """Box-Muller: from words (k, a) the pair r cos(t), r sin(t), with

        u = (k + 1/2) 2^-64,   r = std sqrt(-2 ln u),   t = pi a 2^-63,

    k read as unsigned and a as signed. u is rounded once, in its own binade: the smallest is 2^-65
    exactly (r = 9.49 std) and the tail has the full relative precision of float64; the largest rounds
    to 1, where r = 0. u is never 0 and never above 1, so no word gives NaN or infinity.
    """
    k, a = words.view(-1, 2).unbind(1)
    first, second = out.view(-1, 2).unbind(1)
    radius, angle, cosine = workspace.unbind()
    radius.copy_(k.view(torch.uint64)).add_(0.5).mul_(2.0**-64)
    radius.log_().mul_(-2.0).sqrt_().mul_(std)
    angle.copy_(a).mul_(math.pi * 2.0**-63)
    torch.cos(angle, out=cosine)
    first.copy_(cosine.mul_(radius))
    second.copy_(angle.sin_().mul_(radius))


def _cpu_words(key: bytes, count: int) -> Iterator[Tensor]:
    """The first `count` words of the key's Philox stream, in chunks.

    torch.Generator is not used on the CPU: its Mersenne twister keeps 32 bits of the seed (seeds s and
    s + 2^32 give one stream), few enough to try them all against a released value.
    """
    chunks = [(start, min(_CPU_CHUNK, count - start)) for start in range(0, count, _CPU_CHUNK)]
    drawers = min(torch.get_num_threads(), _DRAWERS)
    if drawers == 1 or len(chunks) <= 1:
        for start, size in chunks:
            yield _philox(key, start, size)
        return
    # Numpy lets go of the interpreter lock while it draws, so words are drawn ahead of their use.
    with ThreadPoolExecutor(drawers) as pool:
        drawn: deque[Future[Tensor]] = deque()
        for start, size in chunks:
            drawn.append(pool.submit(_philox, key, start, size))
            if len(drawn) > drawers:
                yield drawn.popleft().result()
        while drawn:
            yield drawn.popleft().result()


def _philox(key: bytes, start: int, count: int) -> Tensor:
    """Words start ... start + count - 1 of the stream (start divisible by 4), as int64.

    All 32 bytes count: the first half is Philox's key, the second the high half of its counter, whose
    low half is the position. A place in the stream is reached directly, so chunks can be drawn in any
    order and by any thread.
    """
    secret = np.frombuffer(key, dtype="<u8").astype(np.uint64)
    counter = np.array([start // 4, 0, *secret[2:]], dtype=np.uint64)  # one count gives four words
    stream = np.random.Generator(np.random.Philox(key=secret[:2], counter=counter))
    # All 64 bits of every word; unlike random_raw, this lets go of the interpreter lock.
    words = stream.integers(0, 2**64 - 1, size=count, dtype=np.uint64, endpoint=True)
    return torch.from_numpy(words.view(np.int64))


def _cuda_words(key: bytes, count: int, device: torch.device) -> Iterator[Tensor]:
    """`count` words from torch's CUDA generator, a Philox with 64 bits of key, in chunks.

    A further 60 bits of secret choose where in that stream the draw begins. Torch offers no more than
    that, 124 bits where the CPU uses 256, and its words depend on its kernels and on a chunk's size.
    """
    seed, offset = np.frombuffer(key[:16], dtype="<u8").tolist()
    generator = torch.Generator(device).manual_seed(seed)
    generator.set_offset((offset >> 4) << 2)  # torch wants a multiple of 4; below 2^62 nothing overflows
    for start in range(0, count, _CUDA_CHUNK):
        words = torch.empty(min(_CUDA_CHUNK, count - start), dtype=torch.int64, device=device)
        yield words.random_(-(2**63), None, generator=generator)  # this range is all 64 bits
