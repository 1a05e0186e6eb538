"""What a release holds, with its noise."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from clipwise.clipping import Clipper, noised_parts
from clipwise.clipping.base import Split
from clipwise.gradients.real_views import dimension
from clipwise.noise.secure import on_grid
from clipwise.privacy import Part


def parts_of(
    clipper: Clipper, parameters: Mapping[str, nn.Parameter], multiplier: float, split: Split, noise: str
) -> tuple[Part, ...]:
    """The parts of a clipper's release; secure noise adds what the rounding of sums can move."""
    parts = noised_parts(clipper.bounds, parameters, multiplier, split, clipper.divisor)
    if noise != "secure":
        return parts
    beside = {b.name: b.size or 1 for b in clipper.bounds if not b.parameters}  # a count is one number
    return on_grid(parts, beside | {name: dimension(p) for name, p in parameters.items()})
