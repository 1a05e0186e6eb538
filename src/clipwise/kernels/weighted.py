"""sum_b w_b row_b in one read of the rows. A row with weight 0 is excluded, and may hold NaN.

Sums run in float32. Legend: B rows of K entries, S splits of the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.kernels import launch
from clipwise.kernels.launch import Pointer, blocks, constexpr, device_of, jit, power_of_two, tl

_COLUMNS, _ROWS = 128, 8  # of a tile
_PROGRAMS = 1024  # about as many as keep a large GPU busy


def weighted_sum(rows_BK: Tensor, weight_B: Tensor) -> Tensor:
    """[K], in the dtype of the rows."""
    if not launch.fits_float32(rows_BK):
        return weighted_sum_in_torch(rows_BK, weight_B)
    B, K = rows_BK.shape
    columns = min(_COLUMNS, power_of_two(K))
    programs = blocks(K, columns)
    splits, per_split = launch.split(B, _ROWS, programs, _PROGRAMS, tiles=1)
    partial_SK = torch.empty(splits, K, dtype=torch.float32, device=rows_BK.device)
    with device_of(rows_BK):
        _write_sums[(programs, splits)](
            rows_BK, weight_B, partial_SK, B, K, per_split, *rows_BK.stride(), ROWS=_ROWS, COLUMNS=columns
        )
    return launch.added(partial_SK).to(rows_BK.dtype)


def weighted_sum_in_torch(rows_BK: Tensor, weight_B: Tensor) -> Tensor:
    """The twin of `weighted_sum`, equal up to the order of its sum."""
    weight_B1 = weight_B.to(torch.promote_types(rows_BK.dtype, torch.float32))[:, None]
    return torch.where(weight_B1 > 0, rows_BK * weight_B1, 0).sum(0).to(rows_BK.dtype)


@jit
def _write_sums(
    rows: Pointer, weight_B: Pointer, partial_SK: Pointer,
    B: int, K: int, per_split: int, rows_B: int, rows_K: int,
    ROWS: constexpr, COLUMNS: constexpr,
) -> None:  # fmt: skip
    """COLUMNS sums over one split of the rows."""
    k_K = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_there_K = k_K < K
    k_K = k_K.to(tl.int64)
    sum_RK = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, per_split, ROWS):
        b_R = tl.program_id(1) * per_split + first + tl.arange(0, ROWS)
        weight_R = tl.load(weight_B + b_R, mask=b_R < B, other=0.0).to(tl.float32)
        inside_RK = (weight_R > 0.0)[:, None] & is_there_K[None, :]
        at_RK = rows + b_R.to(tl.int64)[:, None] * rows_B + k_K[None, :] * rows_K
        sum_RK += tl.load(at_RK, mask=inside_RK, other=0.0).to(tl.float32) * weight_R[:, None]
    tl.store(partial_SK + tl.program_id(1).to(tl.int64) * K + k_K, tl.sum(sum_RK, axis=0), mask=is_there_K)
