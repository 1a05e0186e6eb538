"""The grid of secure noise: its step, its addition to the sensitivity, and the release on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from clipwise.noise.release import buckets
from clipwise.privacy import Part

FINER_THAN_SENSITIVITY = 2.0**-16
COARSER_THAN_NOISE = 2.0**-36  # a finer grid would need the slow exact path too often
LARGEST = 2.0**52  # grid steps; well within the exact whole numbers of float64

Draw = Callable[[int, int], Tensor]  # (bucket number, size) -> whole numbers in float64


def grid_step(sensitivity: float, noise_std: float, size: int) -> float:
    """The largest power of two g with g sqrt(d) <= 2^-16 S; or g <= 2^-36 sigma, where that is more.

    An empty part (d = 0) gets the step of d = 1.
    """
    limit = max(FINER_THAN_SENSITIVITY * sensitivity / math.sqrt(max(size, 1)), COARSER_THAN_NOISE * noise_std)
    _, exponent = math.frexp(limit)  # limit = m 2^exponent, m in [1/2, 1)
    return math.ldexp(0.5, exponent)


def on_grid(parts: Sequence[Part], sizes: Mapping[str, int]) -> tuple[Part, ...]:
    """The same parts on grids, with the same multiplier: S' = S + g sqrt(d), and noise in proportion.

    `sizes` is the number of coordinates of each parameter, and of each part without parameters.
    """
    return tuple(_on_grid(p, sum(sizes[name] for name in p.parameters or (p.name,))) for p in parts)


def _on_grid(part: Part, size: int) -> Part:
    if part.noise_std == 0:
        return part
    step = grid_step(part.sensitivity, part.noise_std, size)
    up = 1 + 2.0**-40  # so that no rounding here makes the noise smaller than stated
    sensitivity = (part.sensitivity + step * math.sqrt(size)) * (1 + 2.0**-50)
    std = part.noise_std * (sensitivity / part.sensitivity if part.sensitivity > 0 else 1.0) * up
    return replace(part, sensitivity=sensitivity, noise_std=std, grid=step)


@torch.no_grad()
def noised_on_grid(
    sums: list[Tensor], draw: Draw, divisor: float, step: float, scales: Sequence[float] = ()
) -> list[Tensor]:
    """(R(sum) + noise) / divisor of each, with R the nearest multiple of the step, and scales as in `release.noised`.

    Everything before the division is exact: whole numbers of steps in float64. Removes the sums from the list, so that
    their memory is freed early.
    """
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in sums) else torch.float32
    multipliers = list(scales) or [1.0] * len(sums)
    found: list[Tensor] = []
    for number, count in enumerate(buckets([t.numel() for t in sums])):
        bucket = [sums.pop(0) for _ in range(count)]
        noise = draw(number, sum(t.numel() for t in bucket)).to(bucket[0].device)
        pieces = torch.split(noise, [t.numel() for t in bucket])
        for piece, total in zip(pieces, bucket, strict=True):
            m = multipliers[len(found)]
            # m / g is not rounded, since g is a power of two.
            steps = total.double().mul_(m / step).clamp_(-LARGEST, LARGEST).round_().add_(piece.view_as(total))
            found.append(steps.div_(divisor / step).div_(m).to(dtype))
    return found
