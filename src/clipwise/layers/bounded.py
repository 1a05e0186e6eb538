"""Layers with bounded outputs or slopes: clipped input, bounded normalization.

B: examples, C: channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.errors import ConfigurationError
from clipwise.validation.arguments import number, whole

_LEAST_ALPHA = 1e-18  # its square is not 0 in float32


class ClipInput(nn.Module):
    """Clips each example to the L2 norm `max_norm`: x min(1, C / |x|).

    The first module of a network trained with Lipschitz bounds. It is part of the model, in training and evaluation. A
    non-finite example is replaced by 0, and so is one longer than 2^126 C (in float32), whose scale would be rounded.
    Its graph node proves that the inputs were clipped, so an ordinary `loss.backward()` propagates to the inputs.

    Args:
        max_norm: C, a public constant.
    """

    def __init__(self, max_norm: float) -> None:
        super().__init__()
        self.max_norm = number("max_norm", max_norm, above=0)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, ...) to the same shape."""
        if not x.is_floating_point():
            raise ConfigurationError(f"ClipInput takes floating-point inputs, not {x.dtype}: convert the input first.")
        # The anchor creates a graph node although inputs need no gradient.
        anchor = torch.zeros((), requires_grad=True)
        return ClippedInput.apply(x, anchor, self.max_norm)  # type: ignore[no-any-return, no-untyped-call]

    def extra_repr(self) -> str:
        return f"max_norm={self.max_norm:g}"


def row_norms(x: Tensor) -> Tensor:
    """|x_i| of each example, in float64, so that squares do not overflow."""
    rows = x.flatten(1) if x.ndim > 1 else x.unsqueeze(1)
    norms_B: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms_B


def clip_rows(x: Tensor, norms_B: Tensor, max_norm: float, slack: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """x min(1, C / |x|) per example, the scales, and which examples count; the others become 0.

    They are those that are not finite, or so long that their scale is subnormal and would be rounded, possibly up.
    Scales below 1 are multiplied by `slack`.
    """
    scales_B = (max_norm / norms_B).clamp(max=1)
    scales_B = torch.where(scales_B < 1, scales_B * slack, scales_B)
    good_B = torch.isfinite(norms_B) & (scales_B >= torch.finfo(x.dtype).tiny)
    scales_B = scales_B.to(x.dtype)
    shape = (-1, *[1] * (x.ndim - 1))
    return torch.where(good_B.view(shape), x * scales_B.view(shape), 0), scales_B, good_B


class ClippedInput(torch.autograd.Function):
    """The clip as an autograd function. Its node stores the norm and the example shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, max_norm: float) -> Tensor:
        # Times 1 - eps: rounding of the scale and the product must not raise the norm above C.
        clipped, scales_B, good_B = clip_rows(x, row_norms(x), max_norm, 1 - torch.finfo(x.dtype).eps)
        ctx.save_for_backward(clipped, scales_B, good_B)
        ctx.max_norm, ctx.example_shape = max_norm, tuple(x.shape[1:])
        return clipped

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        """s g inside the ball; outside, the component along x is removed: s (g - x (x g) / |x|^2)."""
        clipped, scales_B, good_B = ctx.saved_tensors
        shape = (-1, *[1] * (g.ndim - 1))
        along_B = (clipped * g).flatten(1).sum(1) / ctx.max_norm**2 if g.ndim > 1 else clipped * g / ctx.max_norm**2
        outside_B = (scales_B < 1) & good_B
        radial = torch.where(outside_B.view(shape), clipped * along_B.view(shape), 0)
        return torch.where(good_B.view(shape), scales_B.view(shape) * (g - radial), 0), None, None


class BoundedGroupNorm(nn.Module):
    """(x - mu) / max(alpha, sigma), with mu and sigma per example and group of channels. No parameters.

    Args:
        num_groups: the number of groups.
        num_channels: the size of dimension 1.
        alpha: a lower bound on the divisor. A larger alpha gives smaller gradients and less noise.
    """

    def __init__(self, num_groups: int, num_channels: int, alpha: float = 1.0) -> None:
        super().__init__()
        if whole("num_channels", num_channels, least=1) % whole("num_groups", num_groups, least=1):
            raise ConfigurationError(f"num_groups={num_groups} does not divide num_channels={num_channels}.")
        self.num_groups, self.num_channels = num_groups, num_channels
        self.alpha = number("alpha", alpha, least=_LEAST_ALPHA)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, ...) to the same shape."""
        return _normalized(x.reshape(len(x), self.num_groups, -1), (2,), self.alpha).reshape(x.shape)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.num_channels}, alpha={self.alpha:g}"


class BoundedLayerNorm(nn.Module):
    """(x - mu) / max(alpha, sigma) over the last dimensions. No parameters.

    Args:
        normalized_shape: the last dimensions, as for `torch.nn.LayerNorm`.
        alpha: a lower bound on the divisor.
    """

    def __init__(self, normalized_shape: int | Sequence[int], alpha: float = 1.0) -> None:
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.normalized_shape, self.alpha = shape, number("alpha", alpha, least=_LEAST_ALPHA)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, ..., *normalized_shape) to the same shape."""
        dims = tuple(range(-len(self.normalized_shape), 0))
        if x.ndim <= len(dims) or tuple(x.shape[-len(dims) :]) != self.normalized_shape:
            raise ConfigurationError(
                f"BoundedLayerNorm({self.normalized_shape}) got an input whose last dimensions differ from it."
            )
        return _normalized(x, dims, self.alpha)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, alpha={self.alpha:g}"


def _normalized(x: Tensor, dims: tuple[int, ...], alpha: float) -> Tensor:
    centred = x - x.mean(dims, keepdim=True)
    # Clamp before the root: the slope of the root at 0 is infinite, and infinity times 0 is NaN.
    return centred / centred.square().mean(dims, keepdim=True).clamp(min=alpha * alpha).sqrt()
