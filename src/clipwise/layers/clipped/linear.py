"""Clipped linear layers, over any number of positions."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from clipwise.layers.clipped.linear_map import ClippedMapLayer, Map, MapRole
from clipwise.layers.clipped.scales import Constants, lengths, squared_lengths


class Matrix(Map):
    """x_t -> W x_t at every position t: |dW| = |sum_t g_t x_t^T| <= |x| |g|, with equality at one position."""

    def forward(self, seen: Tensor, weight: Tensor) -> Tensor:
        z: Tensor = F.linear(seen, weight)
        return z

    def pull_back(
        self, h: Tensor, seen: Tensor, weight: Tensor, of_input: bool, of_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        dx: Tensor | None = h @ weight if of_input else None
        dw: Tensor | None = None
        if of_weight:
            dw = h.reshape(-1, h.shape[-1]).t() @ seen.reshape(-1, seen.shape[-1])
        return dx, dw

    def squares(self, x: Tensor) -> Tensor:
        square = squared_lengths(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]))
        return square.view(len(x), 1, math.prod(x.shape[1:-1]))

    def window_lengths(self, squares: Tensor) -> Tensor:
        return squares.sqrt()

    def channels(self, z: Tensor) -> Tensor:
        return z.unsqueeze(-1) if z.dim() == 2 else z.flatten(1, -2).mT

    def gradient_norm(self, sizes: Tensor, lengths_BGP: Tensor) -> Tensor:
        if lengths_BGP.shape[-1] == 1:
            return lengths(sizes) * lengths_BGP[:, 0, 0]
        return super().gradient_norm(sizes, lengths_BGP)

    def bias_view(self, bias: Tensor, z: Tensor) -> Tensor:
        return bias


class ClippedLinear(ClippedMapLayer):
    """`nn.Linear`, clipped: (B, ..., in) to (B, ..., out)."""

    def _take(self, constants: Constants) -> None:
        self._role = MapRole(self, constants, map=Matrix())

    def _least_dimensions(self) -> int:
        return 2
