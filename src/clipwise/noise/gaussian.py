"""The Gaussian law: tail-exact noise from a key.

A Gaussian mechanism promises a density on the whole real line. A sampler that stops early breaks the
promise: `torch.randn` in float32 is built from 24-bit uniforms and never passes 5.8 standard deviations,
so a neighbour's release can fall where the other data set cannot put it. Here every value is drawn in
float64 from full 64-bit words, and only the finished value is rounded to the asked dtype.

On the CPU numpy's ziggurat draws. It lays 256 strips of one area over half of the bell, takes one of them and
a place in it (52 bits), and keeps what lies under the curve: at once where the whole strip does, else by
comparison with exp(-x^2 / 2) itself. The lowest strip ends at r = 3.654; the tail behind it is

    x = r + e,   e = -ln(1 - U) / r,   kept if -2 ln(1 - V) > e^2, else drawn again,

with uniforms U, V of 53 bits. That is the normal law beyond r and no approximation of it: an e comes up with
density r exp(-r e) and stays with probability exp(-e^2 / 2), whose product is a constant times
exp(-(r + e)^2 / 2). Values there lie closer than those of float32 up to 10 standard deviations. The last V,
1 - 2^-53, ends the tail at r + sqrt(2 * 53 ln 2) = 12.2; what is cut off has probability below 1e-33.

On CUDA the words are those of Philox4x32-10, and two of 64 bits make a pair of normals by Box-Muller
(kernels/noise.py), which reach 9.49 standard deviations; what is cut off there has probability below 3e-21.
The two draw alike in law and not in values: one key gives other noise on CUDA than on the CPU.

What is *not* claimed: values are floating-point numbers, so the low bits of a noised sum are those of
rounded real arithmetic, and Philox is a statistical generator, not a proven cipher. `secure/` has a noise of
which both are claimed.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from clipwise.errors import ConfigurationError
from clipwise.kernels.noise import normals
from clipwise.noise.key import KEY_BYTES

# Normals in one piece of work on the CPU: large enough to hide the cost of a call, small enough for the cache
# and for small models to be worth a second thread. It is part of what a key means: another size is other noise.
_CPU_CHUNK = 1 << 15


def gaussian(
    key: bytes,
    size: int,
    std: float,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    onto: Tensor | None = None,
    divisor: float = 1.0,
) -> Tensor:
    """`size` independent values of N(0, std^2), a pure function of `key`; or (onto + those) / divisor, flat.

    On the CPU the result depends on nothing else (but for a numpy that draws otherwise), not even on the number of
    threads. On CUDA the noise of a key is another one, and its last bits are those of the device's own functions.
    On both a shorter draw is the beginning of a longer one, so how a flat buffer is cut afterwards does not matter.
    Other devices get the CPU's values.

    Args:
        key: 32 bytes from `NoiseKey.derive`. Two draws from one key are the same noise.
        size: how many values.
        std: the standard deviation.
        device: where the values are wanted.
        dtype: float32 or float64. Noise is never less precise than float32: for parameters of a lower
            precision, add it in float32 and round the noised sum.
        onto: what the noise is put onto: `size` values of that type on that device, contiguous.
        divisor: what the noised sum is divided by. It needs `onto`.
    """
    _require_drawable(key, [size], [std])
    if dtype not in (torch.float32, torch.float64):
        raise ConfigurationError(
            f"dtype={dtype} is not possible for noise: draw it in torch.float32 or torch.float64, add it, "
            "and round the noised sum."
        )
    target = torch.device(device)
    if target.type == "cuda":
        # 128 bits of the key count there: words from a counter, made into normals by Box-Muller.
        words_4 = key_words(key).to(target, non_blocking=True)
        return normals(words_4, size, std, dtype, target, onto, divisor)
    noise = _on_cpu(key, [size], [std], dtype).to(target)
    return noise if onto is None else noise.add_(onto.view(-1)).div_(divisor)


def gaussian_in_pieces(key: bytes, sizes: Sequence[int], stds: Sequence[float]) -> Tensor:
    """The values that `gaussian` draws from the key on the CPU, flat, each piece of them with a std of its own."""
    _require_drawable(key, sizes, stds)
    return _on_cpu(key, sizes, stds, torch.float32)


def _require_drawable(key: bytes, sizes: Sequence[int], stds: Sequence[float]) -> None:
    if len(key) != KEY_BYTES:
        raise ConfigurationError(f"key must be {KEY_BYTES} bytes: take it from NoiseKey.derive(label).")
    if min(sizes) < 0:
        raise ConfigurationError("size must not be negative.")
    if not all(math.isfinite(std) and std >= 0 for std in stds):
        raise ConfigurationError("std must be a finite number that is not negative.")


def _on_cpu(key: bytes, sizes: Sequence[int], stds: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Chunks of the draw, by as many threads as torch may use; a draw of one chunk by the caller alone."""
    ends = list(accumulate(sizes))
    noise = torch.empty(ends[-1], dtype=dtype)
    starts = deque(range(0, ends[-1], _CPU_CHUNK))
    by_all_threads(starts, partial(_draw_chunks, key, noise, ends, stds))
    return noise


def by_all_threads(starts: deque[int], draw_chunks: Callable[[deque[int]], None]) -> None:
    """Let threads take chunks from where they start until none is left; one chunk is for the caller alone."""
    threads = torch.get_num_threads()
    if threads == 1 or len(starts) <= 1:
        draw_chunks(starts)
        return
    pool = _pool(os.getpid(), threads)
    drawers = range(min(threads, len(starts)))
    for drawer in [pool.submit(draw_chunks, starts) for _ in drawers]:
        drawer.result()


@lru_cache(maxsize=1)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """The threads that draw. Threads do not survive a fork, so another process gets its own."""
    return ThreadPoolExecutor(threads, thread_name_prefix="clipwise-noise")


def _draw_chunks(
    key: bytes, noise: Tensor, ends: Sequence[int], stds: Sequence[float], starts: deque[int]
) -> None:
    """Draw chunks until no start is left, by way of one buffer in float64.

    Numpy lets go of the interpreter lock while it draws and while it scales, so threads do this side by side.
    """
    out = noise.numpy()
    buffer = np.empty(min(_CPU_CHUNK, len(out)))
    while starts:
        try:
            start = starts.popleft()
        except IndexError:  # another thread was quicker
            return
        stop = min(start + _CPU_CHUNK, len(out))
        drawn = buffer[: stop - start]
        _stream(key, start // _CPU_CHUNK).standard_normal(out=drawn)
        piece, here = bisect_right(ends, start), start
        while here < stop:
            end = min(ends[piece], stop)
            scaled = drawn[here - start : end - start]
            np.multiply(scaled, stds[piece], out=out[here:end], casting="same_kind")
            piece, here = piece + 1, end


def _stream(key: bytes, chunk: int) -> np.random.Generator:
    """The words that a chunk is drawn from, of one Philox stream.

    All 32 bytes of the key count: the first half is Philox's key, the second the high half of its counter.
    Word 1 of the counter is the chunk's number and word 0 counts from 0 within it, so no two chunks share
    a word, and any thread can draw any chunk at any time.

    torch.Generator is not used on the CPU: its Mersenne twister keeps 32 bits of the seed (seeds s and
    s + 2^32 give one stream), few enough to try them all against a released value.
    """
    secret = np.frombuffer(key, dtype="<u8").astype(np.uint64)
    counter = np.array([0, chunk, *secret[2:]], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=secret[:2], counter=counter))


def key_words(key: bytes) -> Tensor:
    """A key as the device reads it: int64[4]."""
    return torch.frombuffer(bytearray(key), dtype=torch.int64)
