"""The part of a tensor in this process: all of an ordinary tensor, the local tensor of a DTensor.

Operations on a whole DTensor would wait for other processes.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor


def own_part(t: Tensor) -> Tensor:
    """The entries of a tensor in this process."""
    if not hasattr(t, "to_local"):
        return t
    with torch.no_grad():
        return cast(Tensor, t.to_local())


def own_part_of_gradient(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The entries of a gradient that lie where those of the parameter do. All ranks of a DTensor call it."""
    if not hasattr(gradient, "to_local") or not hasattr(parameter, "placements"):
        return own_part(gradient)
    return own_part(gradient.redistribute(parameter.device_mesh, parameter.placements))  # type: ignore[attr-defined]
