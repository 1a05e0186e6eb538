"""nn.Conv1d/2d/3d and their transposes, with any stride, padding, dilation and groups.

For large images and few kernels, the per-example weight gradients are written out. For few positions and many channels
(the late layers of a network), a gradient is far larger than its factors, and stays a sum over windows of the input
(forms/windows.py). A convolution with kernels of size 1 is a linear layer. A measured cost model decides.

Gradients are written out by one of three methods, none of which unfolds a batch of images:
    a Triton kernel, on a GPU, for few inputs per window (kernels/convolution.py);
    products with windows, a few examples at a time, on a CPU, if the input channels are not a multiple of 8;
    otherwise one convolution with the examples as groups (geometry.py).

Legend: B examples, k rows each, T positions of the output in those rows, p and c channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clipwise import kernels
from clipwise.gradients.forms import (
    Form,
    Outer,
    Permuted,
    Windows,
    Written,
    at_least_float32,
    gram_pays_on_cuda,
    windows_pay,
    written_products,
)
from clipwise.gradients.forms.windows import COPY_BYTES
from clipwise.gradients.geometry import Geometry, positions
from clipwise.gradients.layout import Layout
from clipwise.gradients.rules.products import channel_sum
from clipwise.gradients.rules.registry import Finish, RuleDoesNotApply, Shapes, register, require_axis
from clipwise.gradients.walk import Node
from clipwise.kernels import convolution as kernel
from clipwise.kernels.tracing import is_tracing

_PIECE_BYTES = 4 * 2**20  # of gradients or windows at once on a CPU, so that they stay in its caches
_FEW_INPUTS = 64  # per window, on CUDA
_CHANNELS = 8  # CPU convolutions use blocks of this many channels, and are slow otherwise

Gradients = Callable[[Tensor, Tensor], Tensor]  # (inputs, output gradients) -> weight gradients


@register("ConvolutionBackward0")
def convolution(node: Node, shapes: Shapes) -> Finish:
    """Operands: 1 the weight [p, c/groups, *kernel] (transposed: [c, p/groups, *kernel]), 2 the bias [p]."""
    if 0 in shapes:
        raise RuleDoesNotApply("a convolution of a parameter")
    x = node._saved_input if 1 in shapes else None
    geometry = _geometry(node, shapes[1]) if 1 in shapes else None

    def finish(g: Tensor, layout: Layout) -> dict[int, Form]:
        require_axis(layout, 0)
        forms: dict[int, Form] = {}
        if 2 in shapes:
            forms[2] = channel_sum(g, layout)
        if x is not None and geometry is not None:
            x_Bk, g_Bk = (_fold(at_least_float32(t), layout) for t in (x, g))
            forms[1] = _form(x_Bk, g_Bk, geometry)
        return forms

    return finish


def _geometry(node: Node, weight: torch.Size) -> Geometry:
    axes = len(weight) - 2

    def each(sizes: Sequence[int]) -> tuple[int, ...]:
        """One entry may apply to all axes."""
        return tuple(sizes) * (axes if len(sizes) == 1 else 1)

    return Geometry(
        weight,
        each(node._saved_stride),
        each(node._saved_padding),
        each(node._saved_dilation),
        node._saved_groups,
        node._saved_transposed,
        each(node._saved_output_padding),
    )


def _fold(t: Tensor, layout: Layout) -> Tensor:
    """[N, C, ...] -> [B, k, C, ...]."""
    return layout.split(t).flatten(1, 2)


def _form(x_Bk: Tensor, g_Bk: Tensor, geometry: Geometry) -> Form:
    if kernels.supported(x_Bk) and geometry.groups == 1 and not geometry.transposed:
        return _form_on_cuda(x_Bk, g_Bk, geometry)
    if windows_pay(x_Bk, g_Bk, geometry):
        return Windows(x_Bk, g_Bk, geometry)
    is_simple = geometry.groups == 1 and not geometry.transposed
    if is_simple and geometry.kernel.numel() == 1:
        return Outer(positions(g_Bk), geometry.windows(x_Bk), geometry.weight)
    gradients, bytes_each = geometry.weight_gradients, geometry.weight.numel() * x_Bk.element_size()
    if is_simple and x_Bk.device.type == "cpu" and x_Bk.shape[2] % _CHANNELS:
        gradients = partial(_by_windows, geometry)
        window_bytes = x_Bk.element_size() * geometry.weight[1:].numel()
        bytes_each = max(bytes_each, window_bytes * g_Bk.shape[1] * g_Bk.shape[3:].numel())
    piece = max(1, _PIECE_BYTES // bytes_each) if x_Bk.device.type == "cpu" else None
    return _written(x_Bk, g_Bk, geometry.weight, gradients, piece)


def _form_on_cuda(x_Bk: Tensor, g_Bk: Tensor, geometry: Geometry) -> Form:
    """The kernel for few inputs per window. Otherwise windows are copied: for norms only, if inner products are
    cheaper than gradients. (Measured; this affects the speed, and no result.)
    """
    p, n, T = geometry.weight[0], geometry.weight[1:].numel(), g_Bk.shape[1] * g_Bk.shape[3:].numel()
    if geometry.kernel.numel() == 1:
        return Outer(positions(g_Bk), geometry.windows(x_Bk), geometry.weight)
    if n <= _FEW_INPUTS and kernel.fits(x_Bk, g_Bk):
        return _written(x_Bk, g_Bk, geometry.weight, partial(_by_kernel, geometry))
    if gram_pays_on_cuda(T, p, n):
        return Windows(x_Bk, g_Bk, geometry)
    piece = max(1, COPY_BYTES // (n * T * x_Bk.element_size()))
    shape = torch.Size((p, *geometry.kernel, geometry.weight[1]))
    written = _written(x_Bk, g_Bk, shape, partial(_by_patches, geometry), piece)
    return Permuted(written, (0, len(shape) - 1, *range(1, len(shape) - 1)))


def _written(x_Bk: Tensor, g_Bk: Tensor, shape: torch.Size, gradients: Gradients, piece: int | None = None) -> Written:
    def make(examples: slice) -> Tensor:
        return gradients(x_Bk[examples], g_Bk[examples])

    return Written(len(x_Bk), shape, x_Bk.dtype, make, None if _is_unrolled(x_Bk) else piece)


def _is_unrolled(x: Tensor) -> bool:
    """Whether a traced graph would hold the operations of each piece; on CUDA there are few."""
    return x.device.type == "cpu" and is_tracing()


def _by_windows(geometry: Geometry, x_bk: Tensor, g_bk: Tensor) -> Tensor:
    product = written_products(positions(g_bk), geometry.windows(x_bk))
    return product.view(len(product), *geometry.weight)


def _by_patches(geometry: Geometry, x_bk: Tensor, g_bk: Tensor) -> Tensor:
    """In the order [b, p, *kernel, c]."""
    product = positions(g_bk).mT @ geometry.patches(x_bk)
    return product.view(len(product), len(product[0]), *geometry.kernel, geometry.weight[1])


def _by_kernel(geometry: Geometry, x_bk: Tensor, g_bk: Tensor) -> Tensor:
    at = geometry.kernel, geometry.stride, geometry.padding, geometry.dilation
    return kernel.weight_gradients(x_bk, g_bk, *at, tf32=_tf32())


def _tf32() -> bool:
    """Whether convolutions currently run in TensorFloat-32 (precision.py sets it for norms and sums)."""
    cudnn: Any = torch.backends.cudnn
    try:
        return bool(cudnn.allow_tf32)
    except RuntimeError:  # set per backend, which the common switch does not support
        return bool(cudnn.conv.fp32_precision == "tf32")
