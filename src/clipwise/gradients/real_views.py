"""Complex tensors as pairs of real numbers.

A complex parameter of n entries counts as 2 n real coordinates: |g|^2 sums the squares of both parts. Clipping norms
and sensitivities are those of the real space, and noise is added to real and imaginary parts alike.

`own_part` is the part of a tensor in this process: all of an ordinary tensor, the local tensor of a DTensor. Operations
on a whole DTensor would wait for other processes.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor


def dimension(t: Tensor) -> int:
    """The number of real coordinates of a tensor."""
    return 2 * t.numel() if t.is_complex() else t.numel()


def real_view(t: Tensor) -> Tensor:
    """[..., 2] of a complex tensor, in the same memory; a real tensor unchanged."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def complex_view(t: Tensor) -> Tensor:
    """The inverse of `real_view`, in the same memory if it begins at a whole number of pairs."""
    return torch.view_as_complex(t.clone() if t.storage_offset() % 2 else t)


def own_part(t: Tensor) -> Tensor:
    """The entries of a tensor in this process."""
    if type(t) is Tensor or not hasattr(t, "to_local"):
        return t
    with torch.no_grad():
        return cast(Tensor, t.to_local())


def own_part_of_gradient(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The entries of a gradient that lie where those of the parameter do. All ranks of a DTensor call it."""
    if not hasattr(gradient, "to_local") or not hasattr(parameter, "placements"):
        return own_part(gradient)
    return own_part(gradient.redistribute(parameter.device_mesh, parameter.placements))  # type: ignore[attr-defined]
