"""Bounds of pooling."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipwise.errors import UnsupportedModelError
from clipwise.lipschitz.norms import spectral_bounds
from clipwise.lipschitz.reach import Reach
from clipwise.lipschitz.rule import Norms, Rounding, Rule

MAX = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
AVERAGE = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
ADAPTIVE_MAX = (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
ADAPTIVE_AVERAGE = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)


class AverageRule(Rule):
    """A linear map without parameters that averages: entries do not grow, and its norm is known."""

    def __init__(self, norm: float, out: Sequence[int], rounding: Rounding, most: float = 1.0) -> None:
        self.norm, self.out, self.rounding, self.most = norm, tuple(out), rounding, most

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        (x,), (gain,) = reaches, self.gains(reaches, norms)
        slack = 1 + self.rounding.of_sum(x.size)
        return Reach.of(self.out, norm=gain * x.norm, entry=self.most * slack * x.entry)

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        (x,) = reaches
        return (self.norm * (1 + self.rounding.of_sum(x.size)),)


class MaximumRule(Rule):
    """The largest of each window. A pixel that is in m windows sends m copies forward and adds m gradients: sqrt(m)."""

    def __init__(self, most_windows: int, out: Sequence[int], rounding: Rounding) -> None:
        self.gain, self.out = math.sqrt(most_windows) * (1 + rounding.of_sum(most_windows)), tuple(out)

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        (x,) = reaches
        return Reach.of(self.out, norm=self.gain * x.norm, entry=x.entry)

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        return (self.gain,)


def average_rule(module: nn.Module, shape: Sequence[int], out: Sequence[int], rounding: Rounding) -> Rule:
    """Average pooling is a Kronecker product of one matrix a dimension, whose norms multiply.

    That is so for `count_include_pad=False` and `ceil_mode` too: the divisor of a window is a product over dimensions.
    """
    assert isinstance(module, AVERAGE)
    sizes = _image(module, shape)
    settings = zip(
        sizes,
        _tuple(module.kernel_size, sizes),
        _tuple(module.stride, sizes),
        _tuple(module.padding, sizes),
        strict=True,
    )
    matrices = []
    override = getattr(module, "divisor_override", None)
    for n, k, s, p in settings:
        pixels = torch.eye(n, dtype=torch.float64).unsqueeze(1)
        # With a divisor of its own: sums, which padding does not change; then by the divisor once.
        kept = module.count_include_pad if override is None else True
        pooled = F.avg_pool1d(pixels, k, s, p, module.ceil_mode, kept).squeeze(1)
        matrices.append((pooled > 0).double() if override is not None else pooled)
    norm = math.prod(float(spectral_bounds(m)) for m in matrices)
    if override is None:
        return AverageRule(norm, out, rounding)
    held = math.prod(float(m.sum(0).amax()) for m in matrices)
    return AverageRule(norm / abs(override), out, rounding, most=held / abs(override))


def adaptive_average_rule(
    module: nn.Module, shape: Sequence[int], out: Sequence[int], rounding: Rounding
) -> Rule:
    """As average pooling, with the windows that the sizes give."""
    return AverageRule(
        math.prod(float(spectral_bounds(m)) for m in _adaptive(_image(module, shape), out[1:])), out, rounding
    )


def adaptive_maximum_rule(
    module: nn.Module, shape: Sequence[int], out: Sequence[int], rounding: Rounding
) -> Rule:
    """As max pooling, with the windows that the sizes give."""
    _require_values_only(module)
    most = math.prod(int((m > 0).sum(1).amax()) for m in _adaptive(_image(module, shape), out[1:]))
    return MaximumRule(most, out, rounding)


def maximum_rule(module: nn.Module, shape: Sequence[int], out: Sequence[int], rounding: Rounding) -> Rule:
    """Counts, for each dimension, in how many windows a pixel is."""
    assert isinstance(module, MAX)
    _require_values_only(module)
    sizes = _image(module, shape)
    most = 1
    for n, o, k, s, p, d in zip(
        sizes,
        out[1:],
        _tuple(module.kernel_size, sizes),
        _tuple(module.stride, sizes),
        _tuple(module.padding, sizes),
        _tuple(module.dilation, sizes),
        strict=True,
    ):
        if d > n:
            raise UnsupportedModelError(
                f"{type(module).__name__}: dilation {d} is larger than the image ({n}), so a window can be empty."
            )
        inside = [0] * n
        for q, j in itertools.product(range(o), range(k)):
            if 0 <= (pixel := q * s - p + j * d) < n:
                inside[pixel] += 1
        most *= max(inside)
    return MaximumRule(most, out, rounding)


def _adaptive(sizes: Sequence[int], out: Sequence[int]) -> list[Tensor]:
    """One matrix [n, out] a dimension: what each pixel gives to each window."""
    return [
        F.adaptive_avg_pool1d(torch.eye(n, dtype=torch.float64).unsqueeze(1), o).squeeze(1)
        for n, o in zip(sizes, out, strict=True)
    ]


def _image(module: nn.Module, shape: Sequence[int]) -> Sequence[int]:
    """All dimensions but the channels. Without channels torch takes the examples for them, and pools otherwise."""
    name = type(module).__name__
    if len(shape) != int(name[-2]) + 1:
        raise UnsupportedModelError(
            f"{name}: examples of the shape {tuple(shape)} have no dimension for channels: begin with "
            "nn.Unflatten(1, (1, -1)), or give the data set one."
        )
    return shape[1:]


def _require_values_only(module: nn.Module) -> None:
    if getattr(module, "return_indices", False):
        raise UnsupportedModelError(
            f"{type(module).__name__}: return_indices=True has no bound; leave it out."
        )


def _tuple(value: Any, sizes: Sequence[int]) -> tuple[int, ...]:
    return (value,) * len(sizes) if isinstance(value, int) else tuple(value)
