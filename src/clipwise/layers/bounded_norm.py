"""Normalization by an example's own numbers, with a floor under the deviation: its slope is at most 1 / alpha."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from clipwise.errors import ConfigurationError
from clipwise.validation.arguments import number


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
