"""Compare two computations of the same numbers up to rounding.

Kernels sum in another order for another size or order of a batch. A difference counts if it exceeds

    a few unit roundoffs of the coarsest dtype in use, times the largest number,
    plus a multiple of the effect of a random change of all weights by that roundoff.

The second term measures how much a model amplifies rounding: losses may be small compared with their logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from clipwise.sampling.batch_structure import tensors_in
from clipwise.validation.random_state import fixed_random_state

FLOAT32 = torch.finfo(torch.float32).eps

_ROUNDINGS, _SPREADS = 64.0, 16.0
_ROUNDINGS_HALF = 8.0  # for dtypes with 8 or 11 bits, which are summed in float32


class CoarsestType(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the largest unit roundoff among the results in a block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.eps = 0.0

    def __enter__(self) -> CoarsestType:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in tensors_in(result):
            if t.is_floating_point():
                self.eps = max(self.eps, torch.finfo(t.dtype).eps)
        return result


def perturbed(weights: Mapping[str, Tensor], roundoff: float, seed: int) -> dict[str, Tensor]:
    """Return the weights, each changed by about one roundoff. Tied weights stay tied."""
    moved: dict[int, Tensor] = {}
    with fixed_random_state(seed), torch.no_grad():
        for t in weights.values():
            if id(t) not in moved:
                changed = t * (1 + roundoff * torch.randn_like(t)) if t.is_floating_point() else t.detach()
                moved[id(t)] = changed.requires_grad_(t.requires_grad)
    return {name: moved[id(t)] for name, t in weights.items()}


def largest(t: Tensor) -> float:
    """Return the largest absolute value of the finite entries."""
    return float(t.abs().nan_to_num(0.0, 0.0).max()) if t.numel() else 0.0


def limits(sizes: Sequence[float], roundoff: float, spreads: Sequence[float] | None = None) -> list[float]:
    """Return how far rounding may move the losses (first) and each gradient.

    `sizes` are the tensors' largest entries, `spreads` their changes when all weights change by the roundoff.
    """
    roundings = roundoff * (_ROUNDINGS if roundoff < 1e-5 else _ROUNDINGS_HALF)
    least = max(sizes[1:], default=0.0) / 8  # a gradient that cancels has rounding errors of larger ones
    scales = [sizes[0], *(max(size, least) for size in sizes[1:])]
    spreads = [0.0] * len(sizes) if spreads is None else spreads
    return [roundings * scale + _SPREADS * s + 1e-30 for scale, s in zip(scales, spreads, strict=True)]


def differing(expected: Sequence[Tensor], found: Sequence[Tensor], most: Sequence[float]) -> int | None:
    """Return the index of the first tensor beyond its limit, or None. Gradients that are not finite are skipped."""
    for number, (a, b, limit) in enumerate(zip(expected, found, most, strict=True)):
        if number and not (bool(a.isfinite().all()) and bool(b.isfinite().all())):
            continue
        if not bool(torch.isclose(a, b, rtol=0.0, atol=limit, equal_nan=True).all()):
            return number
    return None
