"""Layers with bounded outputs or slopes: a clipped input, normalization with a floor, attention by distances, sigmoids.

B: examples, C: channels, T: positions, D: width, H: heads, d: width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.errors import ConfigurationError
from clipwise.validation.arguments import number, plain


class ClipInput(nn.Module):
    """Scales every example down to an L2 norm of `max_norm`, if it is longer: x min(1, C / |x|).

    The first module of a network whose gradients are bounded by its weights. It is a part of the model, so that
    training and evaluation see the same. An example that is not finite counts as 0, and so does one that is longer than
    2^126 C (in float32), whose scale would be rounded. Its place in the graph of a loss shows that the inputs were
    clipped. (So an ordinary `loss.backward()` goes on to the inputs, which costs some time; `torch.autograd.grad` with
    the parameters does not, and neither does a private step.)

    Args:
        max_norm: C, a public constant.
    """

    def __init__(self, max_norm: float) -> None:
        super().__init__()
        self.max_norm = number("max_norm", max_norm, above=0)

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) to the same shape."""
        if not x.is_floating_point():
            raise ConfigurationError(
                f"ClipInput takes numbers with a point, not {x.dtype}: convert the input first."
            )
        # The anchor makes a node of the graph although inputs need no gradient.
        anchor = torch.zeros((), requires_grad=True)
        return ClippedInput.apply(x, anchor, self.max_norm)  # type: ignore[no-any-return, no-untyped-call]

    def extra_repr(self) -> str:
        return f"max_norm={self.max_norm:g}"


class ClippedInput(torch.autograd.Function):
    """The clip, as a node that knows its norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, max_norm: float) -> Tensor:
        rows = x.flatten(1) if x.ndim > 1 else x.unsqueeze(1)
        norms_B = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)  # squares that do not overflow
        scales_B = (max_norm / norms_B).clamp(max=1)
        # Times 1 - eps: rounding the scale and the product must not bring the norm above C.
        scales_B = torch.where(scales_B < 1, scales_B * (1 - torch.finfo(x.dtype).eps), scales_B)
        # A smaller scale would be rounded, perhaps up.
        good_B = torch.isfinite(norms_B) & (scales_B >= torch.finfo(x.dtype).tiny)
        shape = (-1, *[1] * (x.ndim - 1))
        clipped = torch.where(good_B.view(shape), x * scales_B.to(x.dtype).view(shape), 0)
        ctx.save_for_backward(clipped, scales_B.to(x.dtype), good_B)
        ctx.max_norm, ctx.example_shape = max_norm, tuple(x.shape[1:])
        return clipped

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        """s g inside the ball; outside, what is along x is taken out: s (g - x (x g) / |x|^2)."""
        clipped, scales_B, good_B = ctx.saved_tensors
        shape = (-1, *[1] * (g.ndim - 1))
        along_B = (
            (clipped * g).flatten(1).sum(1) / ctx.max_norm**2 if g.ndim > 1 else clipped * g / ctx.max_norm**2
        )
        outside_B = (scales_B < 1) & good_B
        radial = torch.where(outside_B.view(shape), clipped * along_B.view(shape), 0)
        return torch.where(good_B.view(shape), scales_B.view(shape) * (g - radial), 0), None, None


class BoundedGroupNorm(nn.Module):
    """(x - mu) / max(alpha, sigma), with mu and sigma of each group of channels of each example. No parameters.

    Args:
        num_groups: into how many groups the channels are divided.
        num_channels: the size of dimension 1.
        alpha: the floor under the standard deviation. A larger one gives smaller gradients and less noise.
    """

    def __init__(self, num_groups: int, num_channels: int, alpha: float = 1.0) -> None:
        super().__init__()
        if num_groups < 1 or num_channels % num_groups:
            raise ConfigurationError(f"num_groups={num_groups} does not divide num_channels={num_channels}.")
        self.num_groups, self.num_channels, self.alpha = num_groups, num_channels, _floor(alpha)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, ...) to the same shape."""
        return _normalized(x.reshape(len(x), self.num_groups, -1), (2,), self.alpha).reshape(x.shape)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.num_channels}, alpha={self.alpha:g}"


class BoundedLayerNorm(nn.Module):
    """(x - mu) / max(alpha, sigma) over the last dimensions. No parameters.

    Args:
        normalized_shape: the last dimensions, as for `torch.nn.LayerNorm`.
        alpha: the floor under the standard deviation.
    """

    def __init__(self, normalized_shape: int | Sequence[int], alpha: float = 1.0) -> None:
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.normalized_shape, self.alpha = shape, _floor(alpha)

    def forward(self, x: Tensor) -> Tensor:
        """(B, ..., *normalized_shape) to the same shape."""
        dims = tuple(range(-len(self.normalized_shape), 0))
        if x.ndim <= len(dims) or tuple(x.shape[-len(dims) :]) != self.normalized_shape:
            raise ConfigurationError(
                f"BoundedLayerNorm({self.normalized_shape}) got examples whose last dimensions are others."
            )
        return _normalized(x, dims, self.alpha)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, alpha={self.alpha:g}"


def _normalized(x: Tensor, dims: tuple[int, ...], alpha: float) -> Tensor:
    centred = x - x.mean(dims, keepdim=True)
    # The floor comes before the root: its slope at 0 is infinite, and infinity times 0 no number.
    return centred / centred.square().mean(dims, keepdim=True).clamp(min=alpha * alpha).sqrt()


def _floor(alpha: float) -> float:
    found = number("alpha", alpha, above=0)
    if not found * found > torch.finfo(torch.float32).tiny:
        raise ConfigurationError(f"alpha={alpha!r} is too small: its square is 0 in float32.")
    return found


class L2Mixture(nn.Module):
    """y_i = sum_j P_ij v_j with P_i = softmax_j( -|u_i - u_j|^2 / sqrt(d) ), in each head of d columns. No parameters.

    After Kim, Papamakarios and Mnih (2021). A position always attends to itself at distance 0, so far ones
    weigh exponentially little: that is what bounds the slope.

    Args:
        heads: how many, each with its own columns of places and values.
        causal: whether a position attends to itself and earlier ones only.
    """

    def __init__(self, heads: int = 1, causal: bool = False) -> None:
        super().__init__()
        if heads < 1:
            raise ConfigurationError(f"heads must be a positive whole number, not {heads!r}.")
        self.heads, self.causal = heads, causal

    def forward(self, places: Tensor, values: Tensor) -> Tensor:
        """(B, T, D) twice to (B, T, D)."""
        u_BHTd, v_BHTd = self._by_head(places), self._by_head(values)
        # Differences and no Gram matrix: that would round relative to |u|^2, and 0 would not be 0.
        apart_BHTT = (u_BHTd.unsqueeze(-2) - u_BHTd.unsqueeze(-3)).square().sum(-1)
        scores_BHTT = -apart_BHTT / math.sqrt(u_BHTd.shape[-1])
        if self.causal:
            T = places.shape[1]
            later = torch.ones(T, T, dtype=torch.bool, device=places.device).triu(1)
            scores_BHTT = scores_BHTT.masked_fill(later, -math.inf)
        mixed_BHTd = scores_BHTT.softmax(-1) @ v_BHTd
        return mixed_BHTd.transpose(1, 2).flatten(2)

    def _by_head(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], self.heads, -1).transpose(1, 2)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, causal={self.causal}"


class L2Attention(nn.Module):
    """Self-attention for networks with certified bounds: places and values by linear maps, `L2Mixture`, a linear map.

    Args:
        width: of every position, in and out; a multiple of `heads`.
        heads: how many.
        causal: whether a position attends to itself and earlier ones only.
        bias: whether the linear maps have one.
    """

    def __init__(self, width: int, heads: int = 1, causal: bool = False, bias: bool = False) -> None:
        super().__init__()
        if width % heads:
            raise ConfigurationError(f"heads={heads} does not divide width={width}.")
        self.places = nn.Linear(width, width, bias=bias)
        self.values = nn.Linear(width, width, bias=bias)
        self.mixture = L2Mixture(heads, causal)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to the same shape."""
        return self.out(self.mixture(self.places(x), self.values(x)))  # type: ignore[no-any-return]


class TemperedSigmoid(nn.Module):
    """scale / (1 + exp(-temperature x)) - offset, for each value by itself. The defaults make it tanh.

    Args:
        scale: the distance between the two values that it tends to.
        temperature: the inverse temperature: the larger, the closer to a step.
        offset: what is taken off; scale / 2 makes it odd.

    Guarantee:
        Examples stay apart. Outputs lie in [-offset, scale - offset].
    """

    def __init__(self, scale: float = 2.0, temperature: float = 2.0, offset: float = 1.0) -> None:
        super().__init__()
        self.scale: float = plain(scale)
        self.temperature: float = plain(temperature)
        self.offset: float = plain(offset)
        for name in ("scale", "temperature", "offset"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ConfigurationError(f"TemperedSigmoid: {name} must be a finite number, not {value!r}.")

    def forward(self, x: Tensor) -> Tensor:
        """Value by value."""
        return self.scale * torch.sigmoid(self.temperature * x) - self.offset

    def extra_repr(self) -> str:
        """For printing."""
        return f"scale={self.scale}, temperature={self.temperature}, offset={self.offset}"
