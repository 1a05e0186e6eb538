"""nn.Conv1d/2d/3d and their transposes, with any stride, padding, dilation and groups, without unfolding.

The per-example weight gradients are the weight gradient of *one* convolution whose groups are the
examples: inputs [B, C, ...] become channels [1, B*C, ...], and B*groups groups keep the examples apart.
Rows of one example (a fold of k) become the batch of that convolution, which sums over them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.gradients.forms import Form, Written, at_least_float32
from clipwise.gradients.layout import Layout
from clipwise.gradients.rules.registry import Finish, RuleDoesNotApply, Shapes, register
from clipwise.gradients.rules.sums import channel_sum
from clipwise.gradients.walk import Node


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

        def make(examples: slice) -> Tensor:
            x_kBc, g_kBp = (_examples_to_channels(t[examples]) for t in (x_Bk, g_Bk))
            b = len(x_Bk[examples])
            weight = x_kBc.new_empty((b * weight_shape[0], *weight_shape[1:]))
            gradient: Tensor = torch.ops.aten.convolution_backward(
                g_kBp, x_kBc, weight, None, stride, padding, dilation, transposed, output_padding,
                b * groups, [False, True, False],
            )[1]  # fmt: skip
            return gradient.view(b, *weight_shape)

        forms[1] = Written(layout.batch, weight_shape, x_Bk.dtype, make)
        return forms

    return finish


def _fold(t: Tensor, layout: Layout) -> Tensor:
    """[N, C, ...] -> [B, k, C, ...]."""
    return layout.split(t).flatten(1, 2)


def _examples_to_channels(t_bk: Tensor) -> Tensor:
    """[b, k, C, ...] -> [k, b*C, ...].

    Along an axis of size 1 any stride counts as contiguous, but some kernels take one for another format.
    """
    t = t_bk.transpose(0, 1).flatten(1, 2)
    plain = torch.empty(t.shape, device="meta").stride()
    return t if t.stride() == plain else t.clone(memory_format=torch.contiguous_format)
