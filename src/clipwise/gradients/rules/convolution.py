"""nn.Conv1d/2d/3d and their transposes, with any stride, padding, dilation and groups.

Where images are large and kernels few, the per-example weight gradients are written out, as the weight
gradient of *one* convolution whose groups are the examples: inputs [B, C, ...] become channels [1, B*C, ...],
and B*groups groups keep the examples apart. Nothing is unfolded. Rows of one example (a fold of k) become the
batch of that convolution, which sums over them.

Where few positions meet many channels (the late layers of a network), a gradient is far larger than what it is
made of: there the convolution is a linear layer on windows of the input, and no gradient is written out. With
kernels of size 1 it is a linear layer anyway.

Legend: B examples, k rows each, T positions of the output in those rows, p and c channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from clipwise.gradients.forms import Form, Outer, Written, at_least_float32, gram_is_cheaper
from clipwise.gradients.layout import Layout
from clipwise.gradients.rules.registry import Finish, RuleDoesNotApply, Shapes, register
from clipwise.gradients.rules.sums import channel_sum
from clipwise.gradients.walk import Node

_PIECE_BYTES = 4 * 2**20  # of gradients in one grouped convolution on a CPU: more fall out of its caches


@register("ConvolutionBackward0")
def convolution(node: Node, shapes: Shapes) -> Finish:
    """Operands: 1 the weight [p, c/groups, *kernel] (transposed: [c, p/groups, *kernel]), 2 the bias [p]."""
    if 0 in shapes:
        raise RuleDoesNotApply("a convolution of a parameter")
    x = node._saved_input if 1 in shapes else None
    stride, padding, dilation = node._saved_stride, node._saved_padding, node._saved_dilation
    output_padding, groups = node._saved_output_padding, node._saved_groups
    transposed = node._saved_transposed

    def finish(g: Tensor, layout: Layout) -> dict[int, Form]:
        if layout.axis != 0:
            raise RuleDoesNotApply("the examples do not lie along the first axis")
        forms: dict[int, Form] = {}
        if 2 in shapes:
            forms[2] = channel_sum(g, layout)
        if x is None:
            return forms
        x_Bk, g_Bk = (_fold(at_least_float32(t), layout) for t in (x, g))
        weight_shape = shapes[1]
        if groups == 1 and not transposed and _is_a_product(g_Bk, weight_shape):
            windows_BTn = _windows(x_Bk, weight_shape[2:], stride, padding, dilation)
            forms[1] = Outer(_positions(g_Bk), windows_BTn, weight_shape)
            return forms

        def make(examples: slice) -> Tensor:
            x_kBc, g_kBp = (_examples_to_channels(t[examples]) for t in (x_Bk, g_Bk))
            b = len(x_Bk[examples])
            weight = x_kBc.new_empty((b * weight_shape[0], *weight_shape[1:]))
            gradient: Tensor = torch.ops.aten.convolution_backward(
                g_kBp, x_kBc, weight, None, stride, padding, dilation, transposed, output_padding,
                b * groups, [False, True, False],
            )[1]  # fmt: skip
            return gradient.view(b, *weight_shape)

        bytes_each = weight_shape.numel() * x_Bk.element_size()
        piece = max(1, _PIECE_BYTES // bytes_each) if x.device.type == "cpu" else None
        forms[1] = Written(layout.batch, weight_shape, x_Bk.dtype, make, piece)
        return forms

    return finish


def _fold(t: Tensor, layout: Layout) -> Tensor:
    """[N, C, ...] -> [B, k, C, ...]."""
    return layout.split(t).flatten(1, 2)


def _is_a_product(g_Bk: Tensor, weight_shape: torch.Size) -> bool:
    """Whether windows are no more than the input itself, or far less than the gradients made of them."""
    T, n = g_Bk.shape[1] * g_Bk.shape[3:].numel(), weight_shape[1:].numel()
    return weight_shape[2:].numel() == 1 or gram_is_cheaper(T, weight_shape[0], n)


def _positions(g_Bk: Tensor) -> Tensor:
    """[B, k, p, ...] -> [B, T, p]."""
    return g_Bk.movedim(2, -1).flatten(1, -2)


def _windows(
    x_Bk: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """[B, k, c, ...] -> [B, T, c * kernel]: what each position of the output saw."""
    sides = [size for p in reversed(padding) for size in (p, p)]
    windows = F.pad(x_Bk, sides) if any(sides) else x_Bk
    for d, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True)):
        windows = windows.unfold(3 + d, gap * (size - 1) + 1, step)[..., ::gap]
    # Now [B, k, c, *positions, *kernel].
    n = len(kernel)
    windows = windows.permute(0, 1, *range(3, 3 + n), 2, *range(3 + n, 3 + 2 * n))
    return windows.reshape(len(x_Bk), windows.shape[1 : 2 + n].numel(), windows.shape[2 + n :].numel())


def _examples_to_channels(t_bk: Tensor) -> Tensor:
    """[b, k, C, ...] -> [k, b*C, ...].

    Along an axis of size 1 any stride counts as contiguous, but some kernels take one for another format.
    """
    t = t_bk.transpose(0, 1).flatten(1, 2)
    plain = torch.empty(t.shape, device="meta").stride()
    return t if t.stride() == plain else t.clone(memory_format=torch.contiguous_format)
