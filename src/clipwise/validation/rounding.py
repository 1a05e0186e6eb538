"""Whether two computations of the same numbers differ by more than rounding.

Kernels add in another order for another size or order of a batch. A difference counts if it is above

    a few unit roundoffs of the coarsest type that runs, times the largest of the numbers,
    plus a multiple of what a random change of all weights by that roundoff does.

The second part measures how far a model magnifies rounding: losses may be small beside the logits they come from.
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
_ROUNDINGS_HALF = 8.0  # of types with 8 or 11 bits, whose sums are formed in float32


class CoarsestType(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds the largest unit roundoff of the results in a block."""

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
    """The weights, each moved by about a roundoff of itself. Tied ones stay tied."""
    moved: dict[int, Tensor] = {}
    with fixed_random_state(seed), torch.no_grad():
        for t in weights.values():
            if id(t) not in moved:
                changed = t * (1 + roundoff * torch.randn_like(t)) if t.is_floating_point() else t.detach()
                moved[id(t)] = changed.requires_grad_(t.requires_grad)
    return {name: moved[id(t)] for name, t in weights.items()}


def largest(t: Tensor) -> float:
    """The largest finite entry, by its absolute value."""
    return float(t.abs().nan_to_num(0.0, 0.0).max()) if t.numel() else 0.0


def limits(sizes: Sequence[float], roundoff: float, spreads: Sequence[float] | None = None) -> list[float]:
    """How far rounding may move the losses, which come first, and gradients.

    `sizes` are the largest entries of the tensors, `spreads` how far they move when all weights move by the roundoff.
    """
    roundings = roundoff * (_ROUNDINGS if roundoff < 1e-5 else _ROUNDINGS_HALF)
    least = max(sizes[1:], default=0.0) / 8  # a gradient that cancels has the rounding of larger ones
    scales = [sizes[0], *(max(size, least) for size in sizes[1:])]
    spreads = [0.0] * len(sizes) if spreads is None else spreads
    return [roundings * scale + _SPREADS * s + 1e-30 for scale, s in zip(scales, spreads, strict=True)]


def differing(expected: Sequence[Tensor], found: Sequence[Tensor], most: Sequence[float]) -> int | None:
    """Which tensor is the first to differ by more than its limit. Gradients that are not finite are not compared."""
    for number, (a, b, limit) in enumerate(zip(expected, found, most, strict=True)):
        if number and not (bool(a.isfinite().all()) and bool(b.isfinite().all())):
            continue
        if not bool(torch.isclose(a, b, rtol=0.0, atol=limit, equal_nan=True).all()):
            return number
    return None
