"""Norms of many weights in few operations, and one copy from their device.

Rules say which norms they want, and all of them are measured together. On a CPU each Gram matrix A A^T gives its
eigenvalues. On an accelerator, where the number of operations counts and not their size, Gram matrices are filled up
with zeros to a few sizes and iterated side by side: zeros change no norm. What is left is arithmetic with numbers, on
the host.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from clipwise.lipschitz.norms import EPS, NOTHING, gram_bounds, iterations_for

_SMALL, _FEW = 256, 8  # up to this side, and for so many matrices, eigenvalues are quick on a CPU
_FILLED_UP = (32, 128)  # sides that smaller ones are filled up to


class Wanted(ABC):
    """A certified norm that is wanted: first operations on the device, then arithmetic with what they gave."""

    @abstractmethod
    def numbers(self) -> list[Tensor]:
        """What has to be brought to the host: float64 without dimensions."""

    @abstractmethod
    def certified(self, numbers: Sequence[float]) -> float:
        """At least the norm. What is not finite gives inf or NaN."""

    def __float__(self) -> float:
        return measured_together([self])[0]


@dataclass(frozen=True)
class Length(Wanted):
    """The root of a sum of `terms` squares, computed in float64."""

    length: Tensor
    terms: int

    def numbers(self) -> list[Tensor]:
        return [self.length]

    def certified(self, numbers: Sequence[float]) -> float:
        (length,) = numbers
        return length * (1 + (self.terms + 16) * EPS) + NOTHING


@dataclass(frozen=True)
class Spectral(Wanted):
    """The largest spectral norm of some matrices, float64 [g, m, n]. See `measured_together` for `numbers`.

    The computed G = A A^T is within 4 (n + 8) u |A|_F^2 of the true one, and |A|_F^2 is the trace, so that

        |A|^2 <= |G| + 4 (n + 8) u |A|_F^2.

    LAPACK's largest eigenvalue of G is within p(m) u |G| of |G|, p a modest polynomial.
    """

    matrices: Tensor

    @cached_property
    def gram(self) -> Tensor:
        """[g, m, m], m the smaller side."""
        a = self.matrices if self.matrices.shape[-2] <= self.matrices.shape[-1] else self.matrices.mT
        return a @ a.mT

    @property
    def is_quick(self) -> bool:
        """Whether eigenvalues take less time than Gram iteration, whose many small steps wait for the interpreter."""
        few, side = self.gram.shape[:2]
        return self.gram.device.type == "cpu" and few <= _FEW and side <= _SMALL

    @cached_property
    def trace(self) -> Tensor:
        """|A|_F^2, of all matrices together."""
        return self.gram.diagonal(0, -2, -1).sum()

    def numbers(self) -> list[Tensor]:
        return [self.trace]

    def certified(self, numbers: Sequence[float]) -> float:
        top, trace = numbers
        if not math.isfinite(trace):
            return trace
        count, m, n = self.matrices.shape[0], min(self.matrices.shape[1:]), max(self.matrices.shape[1:])
        rounding = (4 * (n + 8) + count * m) * EPS
        whole = trace * (1 + 2 * rounding)
        square = max(top, 0.0) * (1 + 16 * m * EPS) + (rounding + 16 * m * EPS) * whole
        return math.sqrt(min(square, whole)) * (1 + 8 * EPS) + NOTHING


@torch.no_grad()
def measured_together(wanted: Sequence[Tensor | Wanted]) -> list[float]:
    """Each norm as a number; a tensor is one that needs no more than its value."""
    spectral = [w for w in wanted if isinstance(w, Spectral) and w.matrices.numel()]
    tops = dict(zip(map(id, spectral), _largest_eigenvalues(spectral), strict=True))
    groups: list[list[Tensor]] = []
    for w in wanted:
        if isinstance(w, Tensor):
            groups.append([w.reshape(())])
        else:
            is_empty = isinstance(w, Spectral) and id(w) not in tops
            groups.append([] if is_empty else [*([tops[id(w)]] if id(w) in tops else []), *w.numbers()])
    flat = [number for group in groups for number in group]
    values = iter(torch.stack(flat).tolist() if flat else [])
    found: list[float] = []
    for w, group in zip(wanted, groups, strict=True):
        here = [next(values) for _ in group]
        found.append(0.0 if not here else here[0] if isinstance(w, Tensor) else w.certified(here))
    return found


def _largest_eigenvalues(spectral: Sequence[Spectral]) -> list[Tensor]:
    """At least the largest eigenvalue of each Gram matrix as it was computed, up to LAPACK's own rounding."""
    found: dict[int, Tensor] = {}
    together: dict[int, list[tuple[int, Tensor]]] = {}
    for place, one in enumerate(spectral):
        gram = one.gram
        side = gram.shape[-1]
        if side == 1:
            found[place] = gram.amax()
        elif one.is_quick:
            is_finite = math.isfinite(float(one.trace))
            found[place] = torch.linalg.eigvalsh(gram)[:, -1].amax() if is_finite else one.trace
        else:
            together.setdefault(_filled_side(gram), []).append((place, gram))
    for side, those in together.items():
        stack = torch.cat([F.pad(g, (0, side - g.shape[-1], 0, side - g.shape[-1])) for _, g in those])
        bounds = gram_bounds(stack, iterations_for(side) - 1)  # G is the result of a first one
        for (place, _), some in zip(those, torch.split(bounds, [len(g) for _, g in those]), strict=True):
            found[place] = some.amax()
    return [found[place] for place in range(len(spectral))]


def _filled_side(gram: Tensor) -> int:
    side = gram.shape[-1]
    if gram.device.type == "cpu":
        return side  # there arithmetic costs more than an operation
    return next((filled for filled in _FILLED_UP if side <= filled), side)
