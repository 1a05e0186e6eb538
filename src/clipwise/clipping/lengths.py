"""Lengths of tensors, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MOST = 2**31  # numbers in a tensor that torch's calls for many at once can count


def tensor_lengths(tensors: Sequence[Tensor]) -> list[Tensor]:
    """|t| of each, in few passes over memory: one call for all but empty and huge ones, which take their own."""
    ordinary = [0 < t.numel() < _MOST for t in tensors]
    together = [t for t, is_ordinary in zip(tensors, ordinary, strict=True) if is_ordinary]
    found = iter(torch._foreach_norm(together, 2, dtype=torch.float64) if together else ())
    return [
        next(found) if is_ordinary else torch.linalg.vector_norm(t, dtype=torch.float64)
        for t, is_ordinary in zip(tensors, ordinary, strict=True)
    ]
