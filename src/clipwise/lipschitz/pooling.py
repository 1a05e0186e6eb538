"""Bounds of pooling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipwise.lipschitz.convolution import Windows
from clipwise.lipschitz.matrix_norms import spectral_bounds
from clipwise.lipschitz.rule import Call, Rule, fixed_gain_rule

MAX = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
AVERAGE = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
ADAPTIVE_MAX = (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
ADAPTIVE_AVERAGE = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)


def averaging_rule(call: Call, norm: float, entry: float = 1.0) -> Rule:
    """The rule of a linear map with a known norm and no parameters; an entry grows by at most `entry`."""
    slack = 1 + call.rounding.of_sum(math.prod(call.shapes[0]))
    return fixed_gain_rule(call.out, norm * slack, entry * slack)


def average_rule(call: Call) -> Rule:
    """Average pooling is a Kronecker product of one matrix per dimension, and the norms multiply.

    This also holds for `count_include_pad=False` and `ceil_mode`: the divisor of a window is a product over dimensions.
    """
    module, sizes = call.target, _image(call)
    each = (_tuple(given, sizes) for given in (module.kernel_size, module.stride, module.padding))
    matrices = []
    override = getattr(module, "divisor_override", None)
    for n, k, s, p in zip(sizes, *each, strict=True):
        pixels = torch.eye(n, dtype=torch.float64).unsqueeze(1)
        # With divisor_override: sums, which padding does not change, divided once at the end.
        kept = module.count_include_pad if override is None else True
        pooled = F.avg_pool1d(pixels, k, s, p, module.ceil_mode, kept).squeeze(1)
        matrices.append((pooled > 0).double() if override is not None else pooled)
    norm = _norm(matrices)
    if override is None:
        return averaging_rule(call, norm)
    held = math.prod(float(m.sum(0).amax()) for m in matrices)
    return averaging_rule(call, norm / abs(override), held / abs(override))


def adaptive_average_rule(call: Call) -> Rule:
    """Average pooling with the windows of the given output sizes."""
    return averaging_rule(call, _norm(_adaptive(call)))


def adaptive_maximum_rule(call: Call) -> Rule:
    """Max pooling with the windows of the given output sizes."""
    return _maximum(call, math.prod(int((m > 0).sum(1).amax()) for m in _adaptive(call)))


def maximum_rule(call: Call) -> Rule:
    """Max pooling, from the largest number of windows that contain one pixel."""
    module, sizes = call.target, _image(call)
    kernel, stride, padding, dilation = (
        _tuple(given, sizes) for given in (module.kernel_size, module.stride, module.padding, module.dilation)
    )
    if any(d > n for n, d in zip(sizes, dilation, strict=True)):
        raise call.refusal("its dilation is larger than the image, so a window can be empty: use a smaller dilation")
    return _maximum(call, Windows(tuple(sizes), kernel, stride, dilation, padding, call.out[1:]).cover)


def _maximum(call: Call, windows: int) -> Rule:
    """The maximum of each window. A pixel in m windows has m copies and receives m gradients: sqrt(m)."""
    if getattr(call.target, "return_indices", False):
        raise call.refusal("return_indices=True has no bound: leave it out")
    return fixed_gain_rule(call.out, math.sqrt(windows) * (1 + call.rounding.of_sum(windows)))


def _adaptive(call: Call) -> list[Tensor]:
    return [
        F.adaptive_avg_pool1d(torch.eye(n, dtype=torch.float64).unsqueeze(1), o).squeeze(1)
        for n, o in zip(_image(call), call.out[1:], strict=True)
    ]


def _norm(matrices: list[Tensor]) -> float:
    return math.prod(float(spectral_bounds(m)) for m in matrices)


def _image(call: Call) -> Sequence[int]:
    """All dimensions except channels. Without channels torch would use the batch as channels."""
    shape = call.shapes[0]
    if len(shape) != int(type(call.target).__name__[-2]) + 1:
        begin = "begin with nn.Unflatten(1, (1, -1)), or add one to the data set"
        raise call.refusal(f"examples of shape {tuple(shape)} have no channel dimension: {begin}")
    return shape[1:]


def _tuple(value: Any, sizes: Sequence[int]) -> tuple[int, ...]:
    return (value,) * len(sizes) if isinstance(value, int) else tuple(value)
