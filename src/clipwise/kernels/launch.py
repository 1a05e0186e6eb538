"""Shared by all kernels: Triton's names, or placeholders without Triton, and the partition of work over programs.

Operands are viewed as [B, K, R] with any strides: B examples, K channels, R positions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from clipwise.kernels import usable

_FAR = 2**31  # entries of an example are counted in 32 bits

_present = find_spec("triton") is not None
triton: Any = import_module("triton") if _present else None
tl: Any = import_module("triton.language") if _present else None

# Annotations of kernel arguments. Triton infers types from the values passed, recognises compile-time arguments by the
# word `constexpr`, and allows only its own classes in a kernel's annotations.
if TYPE_CHECKING or not _present:
    Pointer: TypeAlias = Any
    constexpr: TypeAlias = Any
else:
    Pointer, constexpr = tl.tensor, tl.constexpr


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`. Without Triton, the function itself, which is then never called."""
    return triton.jit(function) if triton is not None else function


def device_of(t: Tensor) -> AbstractContextManager[Any]:
    """Makes a tensor's GPU the current device: Triton launches there, regardless of its arguments."""
    return torch.cuda.device(t.device) if t.device.type == "cuda" else nullcontext()


def fits_float32(*operands: Tensor) -> bool:
    """Whether a kernel that sums in float32 supports these operands; the first must not be empty."""
    first = operands[0]
    return usable(first) and first.numel() > 0 and torch.float64 not in (t.dtype for t in operands)


def blocks(total: int, size: int) -> int:
    """How many blocks of `size` cover `total`."""
    return -(-total // size)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def split(total: int, tile: int, programs: int, busy: int, *, tiles: int = 4, least: int = 1) -> tuple[int, int]:
    """The number of parts of a sum over `total` entries for about `busy` programs in total, and the size of a part.

    Every part writes its own sum, and `added` sums them in a fixed order: atomics would not be deterministic.

    Args:
        total: entries to sum.
        tile: entries that a program reads at a time; a part consists of whole tiles.
        programs: programs per part.
        busy: programs that keep a large GPU busy.
        tiles: minimum number of tiles per part.
        least: minimum number of parts.
    """
    parts = max(least, min(blocks(busy, programs), blocks(total, tiles * tile)))
    return parts, blocks(blocks(total, parts), tile) * tile


def added(partial: Tensor, dim: int = 0) -> Tensor:
    """The sum of all parts along `dim`."""
    return partial.select(dim, 0) if partial.shape[dim] == 1 else partial.sum(dim)


class FlatRows(NamedTuple):
    """Each example is one contiguous row: entry e belongs to channel e // inner % K."""

    length: int
    inner: int


def rows_of(*operands: Tensor) -> FlatRows | None:
    """The rows of operands of equal shape, if each example is contiguous, in the same order, in all of them."""
    _, K, R = operands[0].shape
    if not 0 < K * R < _FAR:
        return None
    for of_K, of_R in ((R, 1), (1, K)):
        if all((K == 1 or t.stride(1) == of_K) and (R == 1 or t.stride(2) == of_R) for t in operands):
            return FlatRows(K * R, of_K)
    return None


def tile_of(x_BKR: Tensor, entries: int) -> tuple[int, int]:
    """Channels and positions of a tile with so many entries, as long as possible along the contiguous axis."""
    _, K, R = x_BKR.shape
    wide_K, wide_R = power_of_two(K), power_of_two(R)
    if R == 1 or (K > 1 and x_BKR.stride(1) < x_BKR.stride(2)):
        kept = min(wide_K, entries)
        return kept, min(wide_R, entries // kept)
    rest = min(wide_R, entries)
    return min(wide_K, entries // rest), rest
