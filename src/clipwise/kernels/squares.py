"""Upper bounds on the squared norms of rows, in one read of the rows.

Squares and sums are computed in float64, where the square of a float32 is exact. Loads cost more than this arithmetic
on any GPU, and float32 values do not underflow. With n terms in any order

    |computed - true| <= (n + 2) u true,   u = 2^-53,

and `row_squares` adds twice that, and a margin for summing the parts of a long row. (A float64 square below 1e-308 may
underflow: `LOST` per term.)

Legend: R rows of n entries; S splits of a row, K columns in a tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.kernels import launch, usable
from clipwise.kernels.launch import Pointer, blocks, constexpr, device_of, jit, power_of_two, tl

LOST = torch.finfo(torch.float64).tiny
_UNIT = torch.finfo(torch.float64).eps / 2
_TILE = 4096  # entries of a tile: enough loads in flight, few enough registers
_PROGRAMS = 1024  # about as many as keep a large GPU busy, and the most splits of a row
_MORE = _PROGRAMS + 16  # roundings beyond those of the squares: summing the splits, a root, the bound itself


def row_squares(x_Rn: Tensor) -> Tensor:
    """An upper bound on the squared norm of each row, [R] in float64. Rows of any strides and float dtype."""
    R, n = x_Rn.shape
    if R == 0 or n == 0 or not usable(x_Rn):
        return row_squares_in_torch(x_Rn)
    columns = min(power_of_two(n), _TILE)
    rows = max(1, min(_TILE // columns, power_of_two(R)))
    programs = blocks(R, rows)
    # Few long rows are split, so that enough programs run.
    splits, per_split = launch.split(n, columns, programs, _PROGRAMS)
    partial_SR = torch.empty(splits, R, dtype=torch.float64, device=x_Rn.device)
    with device_of(x_Rn):
        _write_squares[(programs, splits)](
            x_Rn, partial_SR, R, n, per_split, *x_Rn.stride(), _UNIT, LOST, rows, columns, _MORE
        )
    return launch.added(partial_SR)


def row_squares_in_torch(x_Rn: Tensor) -> Tensor:
    """The twin of `row_squares`: equal up to a relative (n + 2) 2^-53."""
    n = x_Rn.shape[1]
    if n == 0:
        return torch.zeros(len(x_Rn), dtype=torch.float64, device=x_Rn.device)
    square_R: Tensor = torch.linalg.vector_norm(x_Rn, dim=1, dtype=torch.float64).square()
    return square_R * (1 + 2 * (n + _MORE) * _UNIT) + n * LOST


@jit
def _write_squares(
    x: Pointer, partial_SR: Pointer,
    R: int, n: int, per_split: int, stride_R: int, stride_n: int,
    UNIT: constexpr, LOST: constexpr, ROWS: constexpr, COLUMNS: constexpr, MORE: constexpr,
) -> None:  # fmt: skip
    """The bound on one split of ROWS rows."""
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(1).to(tl.int64) * per_split
    sum_RK = tl.zeros([ROWS, COLUMNS], tl.float64)
    for k in range(0, per_split, COLUMNS):
        column_K = start + k + tl.arange(0, COLUMNS)
        inside_RK = (row_R < R)[:, None] & (column_K < n)[None, :]
        x_RK = tl.load(x + row_R[:, None] * stride_R + column_K[None, :] * stride_n, mask=inside_RK, other=0.0)
        x_RK = x_RK.to(tl.float64)
        sum_RK += x_RK * x_RK
    error = 2 * (n + MORE) * tl.full([], UNIT, tl.float64)
    square_R = tl.sum(sum_RK, axis=1) * (1.0 + error) + per_split * tl.full([], LOST, tl.float64)
    tl.store(partial_SR + tl.program_id(1).to(tl.int64) * R + row_R, square_R, mask=row_R < R)
