"""Self-attention by distances, which has bounded slopes; attention by dot products has none."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from clipwise.errors import ConfigurationError


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
