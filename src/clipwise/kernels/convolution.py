"""Per-example weight gradients of a two-dimensional convolution, in one launch, without unfolding.

    gradient_b[p, (c, i, j)] = sum_{row, y, x} g[b, row, p, y, x] image[b, row, c, y sy + i dy - py, x sx + j dx - px]

is, for each example, a product of g [p, K] with windows [K, J]: K the positions of all rows, J = (c, i, j) the
flattened columns of the weight. A program computes one tile of one example's gradient. It loops over the positions and
computes the address of each window entry; entries outside of the image are 0. No window is stored.

NCHW images are read along positions, channels-last images along channels. Columns are numbered so that neighbours in a
tile are neighbours in memory. Sums run in float32, products in IEEE arithmetic or in TensorFloat-32. The eager twin is
`Geometry.weight_gradients` (gradients/geometry.py).

Legend: B examples, P and C channels, H and W sizes of the image, h and w of the output; in a tile P channels of
the output, J columns, K positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clipwise.kernels import supported
from clipwise.kernels.launch import Pointer, blocks, constexpr, device_of, jit, power_of_two, tl
from clipwise.kernels.operators import operator

_LARGEST = 2**31 - 1  # an offset within an example is 32 bits wide


def fits(image: Tensor, g: Tensor) -> bool:
    """Whether the kernel supports these: [B, rows, C, H, W] and [B, rows, P, h, w] in float32, on a GPU."""
    return (
        image.dim() == g.dim() == 5
        and image.dtype == g.dtype == torch.float32
        and all(t.numel() > 0 and _span(t) <= _LARGEST for t in (image, g))
        and supported(image)
    )


def _empty(image_BrCHW: Tensor, g_BrPhw: Tensor, kernel: Sequence[int]) -> Tensor:
    B, _, C = image_BrCHW.shape[:3]
    return g_BrPhw.new_empty(B, g_BrPhw.shape[2], C, *kernel, dtype=torch.float32)


@operator(
    "(Tensor image, Tensor g, int[] kernel, int[] stride, int[] padding, int[] dilation, *, bool tf32) -> Tensor",
    lambda image, g, kernel, *_, tf32: _empty(image, g, kernel),
)
def weight_gradients(
    image_BrCHW: Tensor,
    g_BrPhw: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *,
    tf32: bool,
) -> Tensor:
    """One gradient per example, summed over its rows: [B, P, C, *kernel] in float32. Any strides."""
    B, rows, C, H, W = image_BrCHW.shape
    P, h, w = g_BrPhw.shape[2:]
    columns = C * kernel[0] * kernel[1]
    gradient = _empty(image_BrCHW, g_BrPhw, kernel)
    tile_P, tile_J, tile_K = _tiles(P, columns, rows * h * w)
    tiles_P, tiles_J = blocks(P, tile_P), blocks(columns, tile_J)
    with device_of(image_BrCHW):
        _write_tile[(B * tiles_P * tiles_J,)](
            image_BrCHW, g_BrPhw, gradient,
            *image_BrCHW.stride(), *g_BrPhw.stride(),
            rows * h * w, C, H, W, P, h, w,
            *stride, *padding, *dilation,
            tiles_P, tiles_J,
            HEIGHT=kernel[0], WIDTH=kernel[1],
            CHANNELS_LAST=image_BrCHW.stride(2) == 1 and C > 1,
            TILE_P=tile_P, TILE_J=tile_J, TILE_K=tile_K,
            PRECISION="tf32" if tf32 else "ieee",
            num_warps=8 if tile_P * tile_J > 64 * 128 else 4,
            num_stages=3,
        )  # fmt: skip
    return gradient


def _tiles(P: int, columns: int, positions: int) -> tuple[int, int, int]:
    """Tile sizes: large enough to avoid repeated reads, with little waste at the edge."""
    tile_P = min(128, max(16, power_of_two(P)))
    tile_J = min(128, max(16, power_of_two(columns)))
    if tile_J == 128 and blocks(columns, 64) * 64 < blocks(columns, 128) * 128:
        tile_J = 64
    return tile_P, tile_J, min(32, max(16, power_of_two(positions)))


def _span(t: Tensor) -> int:
    """The distance between the first and the last entry of an example."""
    return sum((size - 1) * step for size, step in zip(t.shape[1:], t.stride()[1:], strict=True))


@jit
def _write_tile(
    image: Pointer, g: Pointer, gradient: Pointer,
    image_B: int, image_r: int, image_C: int, image_H: int, image_W: int, g_B: int, g_r: int, g_P: int,
    g_h: int, g_w: int, positions: int, C: int, H: int, W: int, P: int, h: int, w: int, stride_y: int,
    stride_x: int, padding_y: int, padding_x: int, dilation_y: int, dilation_x: int, tiles_P: int,
    tiles_J: int,
    HEIGHT: constexpr, WIDTH: constexpr, CHANNELS_LAST: constexpr, TILE_P: constexpr, TILE_J: constexpr,
    TILE_K: constexpr, PRECISION: constexpr,
) -> None:  # fmt: skip
    """One tile [TILE_P, TILE_J] of one example's gradient."""
    # Consecutive programs share an example, so that reads hit the cache.
    program = tl.program_id(0)
    example = (program // (tiles_P * tiles_J)).to(tl.int64)
    p_P = (program // tiles_J) % tiles_P * TILE_P + tl.arange(0, TILE_P)
    j_J = program % tiles_J * TILE_J + tl.arange(0, TILE_J)
    offsets = HEIGHT * WIDTH
    if CHANNELS_LAST:
        c_J, offset_J = j_J % C, j_J // C
    else:
        c_J, offset_J = j_J // offsets, j_J % offsets
    # The offset of each column relative to a position. Columns beyond the last point far outside the image.
    far = -(1 << 28)
    down_J = offset_J // WIDTH * dilation_y - padding_y
    right_J = offset_J % WIDTH * dilation_x - padding_x
    from_J = c_J * image_C + down_J * image_H + right_J * image_W
    is_column_J = j_J < C * offsets
    down_J = tl.where(is_column_J, down_J, far)
    image += example * image_B
    g += example * g_B
    sum_PJ = tl.zeros([TILE_P, TILE_J], tl.float32)
    for start in range(0, positions, TILE_K):
        k_K = start + tl.arange(0, TILE_K)
        row_K, place_K = k_K // (h * w), k_K % (h * w)
        y_K, x_K = place_K // w, place_K % w
        top_K, left_K = y_K * stride_y, x_K * stride_x
        to_g_K = row_K * g_r + y_K * g_h + x_K * g_w
        to_image_K = row_K * image_r + top_K * image_H + left_K * image_W
        inside_K = k_K < positions
        top_K = tl.where(inside_K, top_K, far)
        if CHANNELS_LAST:
            y_KJ, x_KJ = top_K[:, None] + down_J[None, :], left_K[:, None] + right_J[None, :]
            # As an unsigned number, a negative coordinate is beyond the image as well.
            seen_KJ = (y_KJ.to(tl.uint32) < H) & (x_KJ.to(tl.uint32) < W)
            window_KJ = tl.load(image + (to_image_K[:, None] + from_J[None, :]), mask=seen_KJ, other=0.0)
            given_KP = inside_K[:, None] & (p_P < P)[None, :]
            g_PK = tl.trans(tl.load(g + (to_g_K[:, None] + p_P[None, :] * g_P), mask=given_KP, other=0.0))
        else:
            y_JK, x_JK = top_K[None, :] + down_J[:, None], left_K[None, :] + right_J[:, None]
            seen_JK = (y_JK.to(tl.uint32) < H) & (x_JK.to(tl.uint32) < W)
            window_JK = tl.load(image + (to_image_K[None, :] + from_J[:, None]), mask=seen_JK, other=0.0)
            window_KJ = tl.trans(window_JK)
            given_PK = (p_P < P)[:, None] & inside_K[None, :]
            g_PK = tl.load(g + (to_g_K[None, :] + p_P[:, None] * g_P), mask=given_PK, other=0.0)
        sum_PJ = tl.dot(g_PK, window_KJ, sum_PJ, input_precision=PRECISION)
    to_PJ = p_P[:, None] * (C * offsets) + (c_J * offsets + offset_J)[None, :]
    within_PJ = (p_P < P)[:, None] & is_column_J[None, :]
    tl.store(gradient + example * P * C * offsets + to_PJ, sum_PJ, mask=within_PJ)
