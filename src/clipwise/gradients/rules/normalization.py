"""Scale and shift of LayerNorm, GroupNorm, RMSNorm and of batch norm with fixed statistics.

With y = gamma * x_hat + beta the gradients are sum_t g_t * x_hat_t and sum_t g_t: positions are summed before squaring.
The rules for repeat and multiplication cover InstanceNorm, which repeats its scale for every example, and unfused
RMSNorm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.errors import CoupledExamplesError
from clipwise.gradients.forms import Form, Written, at_least_float32
from clipwise.gradients.layout import Layout
from clipwise.gradients.rules.products import channel_sum
from clipwise.gradients.rules.registry import Finish, RuleDoesNotApply, Shapes, register, require_axis
from clipwise.gradients.walk import Node
from clipwise.kernels.affine import group_norm_sums, layer_norm_sums, position_sums


@register("NativeLayerNormBackward0")
def layer_norm(node: Node, shapes: Shapes) -> Finish:
    """Operands: 1 the scale, 2 the shift, both of the normalized shape."""
    x = node._saved_input if 1 in shapes else None
    return _along_features(shapes, x, node._saved_result1, node._saved_result2)


@register("FusedRmsNormBackward0")
def rms_norm(node: Node, shapes: Shapes) -> Finish:
    """Operand 1: the scale."""
    x = node._saved_input if 1 in shapes else None
    return _along_features(shapes, x, None, node._saved_result1)


def _along_features(shapes: Shapes, x: Tensor | None, mean: Tensor | None, rstd: Tensor) -> Finish:
    """Statistics per position, over the trailing dimensions."""
    _refuse_normalized_parameters(shapes)
    shape = next(iter(shapes.values()))

    def finish(g: Tensor, layout: Layout) -> dict[int, Form]:
        first = g.dim() - len(shape)
        if layout.axis >= first:
            raise RuleDoesNotApply("the examples lie along the features")
        g_BTd = layout.rows(g.flatten(first))
        if x is None:
            return {operand: _of(position_sums(g_BTd), shape) for operand in shapes}
        mean_BT, rstd_BT = (None if t is None else layout.rows(t.flatten(first)).squeeze(2) for t in (mean, rstd))
        assert rstd_BT is not None
        sums = layer_norm_sums(g_BTd, layout.rows(x.flatten(first)), mean_BT, rstd_BT)
        return {operand: _of(sums[operand - 1], shape) for operand in shapes}

    return finish


@register("NativeGroupNormBackward0")
def group_norm(node: Node, shapes: Shapes) -> Finish:
    """Operands: 1 the scale [C], 2 the shift [C]; statistics are [N, groups]."""
    _refuse_normalized_parameters(shapes)
    x = node._saved_input if 1 in shapes else None
    mean, rstd = node._saved_result1, node._saved_result2

    def finish(g: Tensor, layout: Layout) -> dict[int, Form]:
        require_axis(layout, 0)
        if x is None:
            return {operand: channel_sum(g, layout) for operand in shapes}
        g_NCs, x_NCs = (t.flatten(2) if t.dim() > 2 else t[..., None] for t in (g, x))
        sums = group_norm_sums(g_NCs, x_NCs, mean, rstd)  # [N, C] each
        forms: dict[int, Form] = {operand: channel_sum(sums[operand - 1], layout) for operand in shapes}
        return forms

    return finish


@register("NativeBatchNormBackward0", "CudnnBatchNormBackward0")
def fixed_batch_norm(node: Node, shapes: Shapes) -> Finish:
    """Batch norm in evaluation mode: a constant affine map per channel, then scale and shift."""
    if node._saved_training:
        raise CoupledExamplesError(
            "A batch norm uses the statistics of the batch, so the loss of one example depends on the others. "
            "Use GroupNorm, LayerNorm or InstanceNorm, or fixed statistics (.eval(), training=False)."
        )
    x = node._saved_input if 1 in shapes else None
    mean: Tensor = node._saved_running_mean
    eps = node._saved_eps if hasattr(node, "_saved_eps") else node._saved_epsilon  # cuDNN's name for it
    rstd: Tensor = (node._saved_running_var + eps).rsqrt()
    _refuse_normalized_parameters(shapes)

    def finish(g: Tensor, layout: Layout) -> dict[int, Form]:
        forms: dict[int, Form] = {}
        for operand in shapes:
            h = at_least_float32(g)
            if operand == 1:
                assert x is not None
                channels = [1, -1, *[1] * (x.dim() - 2)]
                h = h * ((at_least_float32(x) - mean.view(channels)) * rstd.view(channels))
            forms[operand] = channel_sum(h, layout)
        return forms

    return finish


def _of(sums_Bd: Tensor, shape: torch.Size) -> Written:
    return Written.of(sums_Bd.view(len(sums_Bd), *shape))


def _refuse_normalized_parameters(shapes: Shapes) -> None:
    if 0 in shapes:
        raise RuleDoesNotApply("the normalized input is computed from parameters")
