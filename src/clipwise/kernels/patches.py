"""Copies the input windows of a convolution's output positions, for channels-last images.

Copying a strided view of the windows takes several times as long, because it computes the address of every number.
Here a program computes the address of a position and copies its channels together. Entries outside of the image are 0.

Legend: N images of H by W, c channels; T = P_h P_w positions of the output; o offsets of the kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.kernels import supported
from clipwise.kernels.launch import Pointer, blocks, constexpr, device_of, jit, power_of_two, tl
from clipwise.kernels.operators import operator

_TILE = 2048  # numbers that a program copies at a time
_LINE = 256  # channels of a tile, at most
_UNROLLED = 9  # unrolled offsets: 256 would take half a minute to compile

Pair = tuple[int, int]


def fits(x_NcHW: Tensor) -> bool:
    """Whether the kernel supports these images."""
    return supported(x_NcHW) and x_NcHW.dim() == 4 and x_NcHW.stride(1) == 1


def _empty(x_NcHW: Tensor, kernel: Pair, positions: Pair) -> Tensor:
    N, c = x_NcHW.shape[:2]
    return x_NcHW.new_empty(N, positions[0] * positions[1], kernel[0] * kernel[1] * c)


@operator(
    "(Tensor x, int[] kernel, int[] stride, int[] padding, int[] dilation, int[] positions) -> Tensor",
    lambda x, kernel, stride, padding, dilation, positions: _empty(x, kernel, positions),
)
def patches(x_NcHW: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, positions: Pair) -> Tensor:
    """[N, T, o * c]: the window of each position, offset by offset."""
    out = _empty(x_NcHW, kernel, positions)
    if out.numel() == 0:
        return out
    if x_NcHW.stride(1) != 1:  # a compiler may have changed the layout
        x_NcHW = x_NcHW.contiguous(memory_format=torch.channels_last)
    N, c, H, W = x_NcHW.shape
    rows, columns = positions
    line = min(_LINE, power_of_two(c))
    places = max(1, _TILE // line)
    total = N * rows * columns
    with device_of(x_NcHW):
        _copy[(blocks(total, places), blocks(c, line))](
            x_NcHW, out, total, rows, columns, H, W, c, x_NcHW.stride(0), x_NcHW.stride(2),
            x_NcHW.stride(3), *stride, *padding, *dilation,
            KERNEL_H=kernel[0], KERNEL_W=kernel[1], UNROLLED=min(kernel[0] * kernel[1], _UNROLLED),
            PLACES=places, LINE=line,
        )  # fmt: skip
    return out


@jit
def _copy(
    x: Pointer, out: Pointer,
    total: int, rows: int, columns: int, H: int, W: int, channels: int, x_N: int, x_H: int, x_W: int,
    stride_h: int, stride_w: int, padding_h: int, padding_w: int, dilation_h: int, dilation_w: int,
    KERNEL_H: constexpr, KERNEL_W: constexpr, UNROLLED: constexpr, PLACES: constexpr, LINE: constexpr,
) -> None:  # fmt: skip
    place_P = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    channel_L = tl.program_id(1) * LINE + tl.arange(0, LINE)
    is_there = (place_P < total)[:, None] & (channel_L < channels)[None, :]
    column_P = place_P % columns
    row_P = place_P // columns % rows
    image_P = x + (place_P // columns // rows).to(tl.int64) * x_N
    out_PL = out + place_P.to(tl.int64)[:, None] * (KERNEL_H * KERNEL_W * channels) + channel_L[None, :]
    for o in tl.range(0, KERNEL_H * KERNEL_W, loop_unroll_factor=UNROLLED):
        h_P = row_P * stride_h - padding_h + o // KERNEL_W * dilation_h
        w_P = column_P * stride_w - padding_w + o % KERNEL_W * dilation_w
        inside_P = (h_P >= 0) & (h_P < H) & (w_P >= 0) & (w_P < W)
        at_PL = (image_P + h_P.to(tl.int64) * x_H + w_P.to(tl.int64) * x_W)[:, None] + channel_L[None, :]
        tl.store(out_PL + o * channels, tl.load(at_PL, mask=is_there & inside_P[:, None], other=0.0), mask=is_there)
