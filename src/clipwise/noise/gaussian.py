"""Gaussian noise with exact tails, drawn from a key.

The Gaussian mechanism needs a density on the whole real line. `torch.randn` in float32 uses 24-bit uniforms and never
exceeds 5.8 standard deviations, so the release of one data set can take values that are impossible for its neighbour.
Here every value is drawn in float64 from full 64-bit words, and only the result is rounded to the requested dtype.

On the CPU the words are those of numpy's Philox, and each gives one normal by a table (standard_normal.py). These reach
9.6 standard deviations; the rest has probability below 1e-21.

On CUDA the words are those of Philox4x32-10, and two 64-bit words make a pair of normals by Box-Muller
(kernels/noise.py). These reach 9.49 standard deviations; the rest has probability below 3e-21. Both devices draw from
the same law, but one key gives different values on CUDA and on the CPU.

What is *not* claimed: values are floating-point numbers, so the low bits of a noised sum are those of rounded real
arithmetic, and Philox is a statistical generator, not a cipher. The noise of `secure/` has neither limitation.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipwise.errors import ConfigurationError
from clipwise.kernels.noise import normals
from clipwise.noise import standard_normal
from clipwise.noise.key import KEY_BYTES

Floats = npt.NDArray[Any]  # float32 or float64

# Normals per chunk on the CPU: large enough to hide the cost of a call, small enough for the cache and for small models
# to use a second thread. Another size gives other noise from the same key.
_CPU_CHUNK = 1 << 15
# Where the two streams of a chunk begin in its 2^64 blocks of words. Older versions used the blocks from 0 on, with
# another algorithm, so no word of a key serves both.
_FIRST_BLOCK, _FIRST_BLOCK_OF_REST = 1 << 62, 1 << 63
BUCKET = 16 * 2**20  # noise values per draw: 64 MiB in addition to the sums


def gaussian(
    key: bytes,
    size: int,
    std: float,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    onto: Tensor | None = None,
    divisor: float = 1.0,
    start: int = 0,
) -> Tensor:
    """`size` independent values of N(0, std^2), a pure function of `key`; or (onto + those) / divisor, flat.

    On the CPU the result depends only on the key and on numpy's algorithm, not on the number of threads. On CUDA a key
    gives other values, and their last bits depend on the device's math functions. Other devices get the CPU's values.
    On all devices a shorter draw is the beginning of a longer one.

    Args:
        key: 32 bytes from `NoiseKey.derive`. Two draws from one key are the same noise.
        size: the number of values.
        std: the standard deviation.
        device: the device of the result.
        dtype: float32 or float64. Noise is never less precise than float32: for parameters of a lower
            precision, add it in float32 and round the noised sum.
        onto: the tensor that the noise is added to: `size` values of that dtype and device, contiguous.
        divisor: the noised sum is divided by this. It needs `onto`.
        start: the number of values of the stream to skip: a rank draws the noise of its shard.
    """
    _require_drawable(key, [size], [std])
    if dtype not in (torch.float32, torch.float64):
        raise ConfigurationError(
            f"dtype={dtype} is not possible for noise: draw it in torch.float32 or torch.float64, add it, "
            "and round the noised sum."
        )
    target = torch.device(device)
    if target.type == "cuda":
        # CUDA uses 128 bits of the key.
        words_4 = key_words(key).to(target, non_blocking=True)
        return normals(words_4, size, std, dtype, target, onto, divisor, start)
    first = start - start % _CPU_CHUNK
    noise = torch.empty(start + size - first, dtype=dtype)
    _on_cpu(key, [noise.numpy()], [std], first // _CPU_CHUNK)
    noise = noise[start - first :].to(target)
    return noise if onto is None else noise.add_(onto.view(-1)).div_(divisor)


def buckets(sizes: Sequence[int]) -> list[int]:
    """The number of consecutive sums that share each draw of noise: many small ones, or a single large one."""
    found: list[int] = []
    left = 0
    for size in sizes:
        if not found or size > left:
            found.append(0)
            left = max(size, BUCKET)
        found[-1] += 1
        left -= size
    return found


def gaussian_in_pieces(key: bytes, sizes: Sequence[int], stds: Sequence[float]) -> Tensor:
    """The values of `gaussian` on the CPU, flat, where each piece has its own standard deviation."""
    _require_drawable(key, sizes, stds)
    noise = torch.empty(sum(sizes))
    _on_cpu(key, [piece.numpy() for piece in torch.split(noise, list(sizes))], stds)
    return noise


@torch.no_grad()
def add_gaussian(key: bytes, sums: Sequence[Tensor], stds: Sequence[float], divisor: float) -> None:
    """Replace each sum by (sum + noise) / divisor, in one pass over memory.

    The noise is that of `gaussian_in_pieces`: the results are equal to the bit.

    Args:
        key: 32 bytes from `NoiseKey.derive`.
        sums: of one dtype, float32 or float64, on the CPU, without gaps in memory. Noise has the order of memory.
        stds: the standard deviation of the noise of each sum.
        divisor: of all sums.
    """
    _require_drawable(key, [0], stds)
    flat = [t.as_strided((t.numel(),), (1,)).numpy() for t in sums]
    _on_cpu(key, flat, stds, divisor=divisor)


def _require_drawable(key: bytes, sizes: Sequence[int], stds: Sequence[float]) -> None:
    if len(key) != KEY_BYTES:
        raise ConfigurationError(f"key must be {KEY_BYTES} bytes: take it from NoiseKey.derive(label).")
    if min(sizes) < 0:
        raise ConfigurationError("size must not be negative.")
    if not all(math.isfinite(std) and std >= 0 for std in stds):
        raise ConfigurationError("std must be a finite number that is not negative.")


def _on_cpu(
    key: bytes, pieces: Sequence[Floats], stds: Sequence[float], first_chunk: int = 0, divisor: float | None = None
) -> None:
    """Draw in chunks, on as many threads as torch may use: into the pieces, or onto them if there is a divisor."""
    ends = list(accumulate(len(piece) for piece in pieces))
    starts = deque(range(0, ends[-1], _CPU_CHUNK))
    by_all_threads(starts, partial(_draw_chunks, key, pieces, ends, stds, first_chunk, divisor))


def by_all_threads(starts: deque[int], draw_chunks: Callable[[deque[int]], None]) -> None:
    """Run `draw_chunks` on all threads, which take chunks from `starts`. The caller draws a single chunk alone."""
    threads = torch.get_num_threads()
    if threads == 1 or len(starts) <= 1:
        draw_chunks(starts)
        return
    pool = _pool(os.getpid(), threads)
    drawers = range(min(threads, len(starts)))
    for drawer in [pool.submit(draw_chunks, starts) for _ in drawers]:
        drawer.result()


def taken_from(starts: deque[int]) -> Iterator[int]:
    """The starts that other threads have not taken."""
    while starts:
        try:
            yield starts.popleft()
        except IndexError:  # another thread was quicker
            return


@lru_cache(maxsize=1)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """The drawing threads. Threads do not survive a fork, so each process has its own."""
    return ThreadPoolExecutor(threads, thread_name_prefix="clipwise-noise")


def _draw_chunks(
    key: bytes,
    pieces: Sequence[Floats],
    ends: Sequence[int],
    stds: Sequence[float],
    first_chunk: int,
    divisor: float | None,
    starts: deque[int],
) -> None:
    """Draw chunks until no start is left, through one float64 buffer.

    Numpy releases the interpreter lock while it draws and scales, so threads run in parallel.
    """
    size = min(_CPU_CHUNK, ends[-1])
    streams = _Streams(key)
    drawn, workspace, scaled = np.empty(size), np.empty(size, dtype=np.uint64), np.empty(size, dtype=pieces[0].dtype)
    for start in taken_from(starts):
        stop = min(start + _CPU_CHUNK, ends[-1])
        words, rest = streams.of(first_chunk + start // _CPU_CHUNK)
        standard_normal.fill(drawn[: stop - start], workspace[: stop - start], words, rest)
        number, here = bisect_right(ends, start), start
        while here < stop:
            end, piece = min(ends[number], stop), pieces[number]
            normals, offset = drawn[here - start : end - start], ends[number] - len(piece)
            place = piece[here - offset : end - offset]
            noise = place if divisor is None else scaled[: end - here]
            np.multiply(normals, stds[number], out=noise, casting="same_kind")
            if divisor is not None:
                np.add(place, noise, out=place)
                np.divide(place, place.dtype.type(divisor), out=place)
            number, here = number + 1, end


class _Streams:
    """The two streams of words of each chunk: parts of one Philox stream.

    All 32 bytes of the key are used: the first half is Philox's key, the second the high half of its counter. Word 1 of
    the counter is the chunk's number and word 0 counts within it, so chunks share no word, and any thread can draw any
    chunk. One pair of generators serves all chunks of a draw: moving one takes a tenth of the time of making one.

    torch.Generator is not used on the CPU: its Mersenne Twister keeps 32 bits of the seed (seeds s and s + 2^32 give
    the same stream), so an attacker could try all seeds against a released value.
    """

    def __init__(self, key: bytes) -> None:
        secret = np.frombuffer(key, dtype="<u8").astype(np.uint64)
        self._pair = np.random.Philox(key=secret[:2]), np.random.Philox(key=secret[:2])
        self._states = [generator.state for generator in self._pair]  # at their beginning, with empty buffers
        for state, first in zip(self._states, (_FIRST_BLOCK, _FIRST_BLOCK_OF_REST), strict=True):
            state["state"]["counter"] = np.array([first, 0, *secret[2:]], dtype=np.uint64)

    def of(self, chunk: int) -> tuple[np.random.BitGenerator, np.random.BitGenerator]:
        """The generators, at the beginning of the words and of the rest of a chunk."""
        for generator, state in zip(self._pair, self._states, strict=True):
            state["state"]["counter"][1] = chunk
            generator.state = state
        return self._pair


def key_words(key: bytes) -> Tensor:
    """A key as int64[4], for the device."""
    return torch.frombuffer(bytearray(key), dtype=torch.int64)
