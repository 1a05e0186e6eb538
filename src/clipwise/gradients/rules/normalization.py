"""Scale and shift of LayerNorm, GroupNorm, RMSNorm and of batch norm with fixed statistics.

With y = gamma * x_hat + beta the gradients are sum_t g_t * x_hat_t and sum_t g_t: positions are summed
before anything is squared. InstanceNorm repeats its scale for every example, and unfused RMSNorm
multiplies by it: the rules for repeat and multiplication cover those two.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from clipwise.errors import CoupledExamplesError
from clipwise.gradients.forms import Form, at_least_float32
from clipwise.gradients.layout import Layout
from clipwise.gradients.rules.registry import Finish, RuleDoesNotApply, Shapes, register
from clipwise.gradients.rules.sums import broadcast_sum, channel_sum
from clipwise.gradients.walk import Node


@register("NativeLayerNormBackward0")
def layer_norm(node: Node, shapes: Shapes) -> Finish:
    """Operands: 1 the scale, 2 the shift, both of the normalized shape."""
    x = node._saved_input if 1 in shapes else None
    mean, rstd = node._saved_result1, node._saved_result2
    return _affine(shapes, lambda: (at_least_float32(_given(x)) - mean) * rstd, by_channel=False)


@register("FusedRmsNormBackward0")
def rms_norm(node: Node, shapes: Shapes) -> Finish:
    """Operand 1: the scale."""
    x = node._saved_input if 1 in shapes else None
    rstd = node._saved_result1
    return _affine(shapes, lambda: at_least_float32(_given(x)) * rstd, by_channel=False)


@register("NativeGroupNormBackward0")
def group_norm(node: Node, shapes: Shapes) -> Finish:
    """Operands: 1 the scale [C], 2 the shift [C]; statistics are [N, groups]."""
    x = node._saved_input if 1 in shapes else None
    mean, rstd = node._saved_result1, node._saved_result2

    def normalized() -> Tensor:
        x_NGr = at_least_float32(_given(x)).reshape(*mean.shape, -1)
        normalized_NGr: Tensor = (x_NGr - mean[..., None]) * rstd[..., None]
        return normalized_NGr.view_as(_given(x))

    return _affine(shapes, normalized, by_channel=True)


@register("NativeBatchNormBackward0", "CudnnBatchNormBackward0")
def fixed_batch_norm(node: Node, shapes: Shapes) -> Finish:
    """Batch norm in evaluation mode: a constant affine map a channel, then scale and shift."""
    if node._saved_training:
        raise CoupledExamplesError(
            "A batch norm uses the statistics of the batch, so the loss of one example depends on the others. "
            "Use GroupNorm, LayerNorm or InstanceNorm, or fixed statistics (.eval(), training=False)."
        )
    x = node._saved_input if 1 in shapes else None
    mean: Tensor = node._saved_running_mean
    eps = node._saved_eps if hasattr(node, "_saved_eps") else node._saved_epsilon  # cuDNN's name for it
    rstd: Tensor = (node._saved_running_var + eps).rsqrt()

    def normalized() -> Tensor:
        channels = [1, -1, *[1] * (_given(x).dim() - 2)]
        return (at_least_float32(_given(x)) - mean.view(channels)) * rstd.view(channels)

    return _affine(shapes, normalized, by_channel=True)


def _given(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def _affine(shapes: Shapes, normalized: Callable[[], Tensor], by_channel: bool) -> Finish:
    if 0 in shapes:
        raise RuleDoesNotApply("what is normalized is made of parameters")

    def finish(g: Tensor, layout: Layout) -> dict[int, Form]:
        forms: dict[int, Form] = {}
        for operand, shape in shapes.items():
            h = at_least_float32(g)
            h = h * normalized() if operand == 1 else h
            forms[operand] = channel_sum(h, layout) if by_channel else broadcast_sum(h, layout, shape)
        return forms

    return finish
