"""Tiles of operands seen as [B, K, R]: B examples, K kept entries and R others of each, with free strides."""

from __future__ import annotations

from torch import Tensor

from clipwise.kernels.language import power_of_two

_TILE = 2048  # entries of a tile
_LINE = 64  # entries along the axis whose neighbours are neighbours in memory: 256 bytes of float32


def tile_of(x_BKR: Tensor) -> tuple[int, int]:
    """Kept and other entries of a tile: long where neighbours in memory are."""
    _, K, R = x_BKR.shape
    wide_K, wide_R = power_of_two(K), power_of_two(R)
    if x_BKR.stride(1) < x_BKR.stride(2) or R == 1:
        kept = min(wide_K, max(_LINE, _TILE // wide_R))
        return kept, min(wide_R, max(1, _TILE // kept))
    rest = min(wide_R, max(_LINE, _TILE // wide_K))
    return min(wide_K, max(1, _TILE // rest)), rest
