"""Distributed noise: each client clips its own vector and adds its share of the noise, on a grid common to all clients.

A vector is truncated to the grid before the noise, and the noise is rounded to it. Sums of such messages are exact in
float64. So neither the noise of a sum nor its rounding depends on the vectors or on their number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from clipwise.noise.gaussian import gaussian
from clipwise.noise.key import NoiseKey

_MARGIN = 2.0**-20  # below the clipping norm, for the rounding of norm and product
_GRID_BITS = 24  # a share's standard deviation is at least 2^24 steps of the grid


def share_std(noise_std: float, honest: int) -> float:
    """The standard deviation of one share, such that the shares of `honest` clients sum to at least `noise_std`."""
    return noise_std / math.sqrt(honest) * (1 + 2.0**-40)


def on_grid(noise: Tensor, std: float) -> Tensor:
    """Noise rounded to the grid of shares with this standard deviation."""
    step = _step(std)
    return torch.round(noise / step) * step


def noised_share(vectors: Mapping[str, Tensor], max_norm: float, std: float) -> dict[str, Tensor]:
    """The vectors, clipped together to `max_norm`, plus fresh N(0, std^2) noise on each entry, in float64 on the CPU.

    The key of the noise comes from the operating system and is used once. Vectors that are not finite count as 0.
    """
    flat = torch.cat([v.detach().flatten().to("cpu", torch.float64) for v in vectors.values()])
    norm = float(torch.linalg.vector_norm(flat))
    # A norm that is not finite, also by overflow, has no direction to clip.
    flat = flat * min(1.0, max_norm * (1 - _MARGIN) / norm) if 0 < norm < math.inf else torch.zeros_like(flat)
    if std > 0:
        step = _step(std)
        noise = gaussian(NoiseKey.fresh().derive("noise-share"), len(flat), std, dtype=torch.float64)
        flat = torch.trunc(flat / step) * step + on_grid(noise, std)
    pieces = torch.split(flat, [v.numel() for v in vectors.values()])
    return {name: piece.view(v.shape) for (name, v), piece in zip(vectors.items(), pieces, strict=True)}


def _step(std: float) -> float:
    """The step of the grid, a power of two."""
    return 2.0 ** (math.frexp(std)[1] - 1 - _GRID_BITS)
