"""Sums over the positions of one example, for operands that were broadcast over them."""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.gradients.forms import Written, at_least_float32
from clipwise.gradients.layout import Layout
from clipwise.gradients.rules.registry import RuleDoesNotApply
from clipwise.kernels.affine import position_sums


def broadcast_sum(h: Tensor, layout: Layout, shape: torch.Size) -> Written:
    """Per example, sum `h` down to an operand of `shape` that was broadcast to h's shape."""
    missing = h.dim() - len(shape)
    if layout.axis >= missing and shape[layout.axis - missing] != 1:
        raise RuleDoesNotApply("the operand has an entry for each example")
    if shape and layout.axis < missing and h.shape[missing:] == shape:  # a bias, nearly always
        h_BTp = layout.rows(h.flatten(missing))
        one_position = h_BTp.shape[1] == 1  # nothing to sum: as at each time step of an RNN
        if one_position or h.is_complex():
            sums_Bp = at_least_float32(h_BTp[:, 0] if one_position else h_BTp.sum(1))
        else:
            sums_Bp = position_sums(h_BTp)
        return Written.of(sums_Bp.reshape(layout.batch, *shape))
    split = layout.split(at_least_float32(h))  # [B, ..., outer, inner, ...]
    summed = [layout.axis + 1, layout.axis + 2]
    for d in range(h.dim()):
        if d != layout.axis and (d < missing or shape[d - missing] == 1):
            summed.append(d + 1 if d < layout.axis else d + 2)
    return Written.of(split.sum(summed).reshape(layout.batch, *shape))


def channel_sum(h: Tensor, layout: Layout) -> Written:
    """Per example, sum `h` of shape [N, C, ...] down to [C]."""
    if layout.axis != 0:
        raise RuleDoesNotApply("the examples do not lie along the first axis")
    split = layout.split(at_least_float32(h))  # [B, outer, inner, C, ...]
    return Written.of(split.sum([1, 2, *range(4, split.dim())]))
