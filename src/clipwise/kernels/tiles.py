"""How operands seen as [B, K, R], with free strides, are laid over programs: B examples, K channels, R positions."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from clipwise.kernels.language import power_of_two

_FAR = 2**31  # entries of an example are counted in 32 bits


class Rows(NamedTuple):
    """Each example is one row of entries that lie side by side: entry e is of channel e // inner % K."""

    length: int
    inner: int


def rows_of(*operands: Tensor) -> Rows | None:
    """Of operands with one shape, if the entries of an example lie side by side and in one order in all of them."""
    _, K, R = operands[0].shape
    if not 0 < K * R < _FAR:
        return None
    for of_K, of_R in ((R, 1), (1, K)):
        if all((K == 1 or t.stride(1) == of_K) and (R == 1 or t.stride(2) == of_R) for t in operands):
            return Rows(K * R, of_K)
    return None


def tile_of(x_BKR: Tensor, entries: int) -> tuple[int, int]:
    """Channels and positions of a tile of so many entries: as long as can be where neighbours in memory are."""
    _, K, R = x_BKR.shape
    wide_K, wide_R = power_of_two(K), power_of_two(R)
    if R == 1 or (K > 1 and x_BKR.stride(1) < x_BKR.stride(2)):
        kept = min(wide_K, entries)
        return kept, min(wide_R, entries // kept)
    rest = min(wide_R, entries)
    return min(wide_K, entries // rest), rest
