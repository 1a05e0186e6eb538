"""Norms of many weights in few operations, with one copy from the device.

Rules list the norms that they need, and all are measured together. One Gram matrix A A^T gives three: its largest
eigenvalue |A|^2, its trace |A|_F^2 and, on its diagonal, the squared row norms. On a CPU, LAPACK computes the
eigenvalues. On an accelerator the number of operations matters, not their size: Gram matrices are zero-padded to a few
sizes, which changes no norm, and iterated in batches. The remaining arithmetic runs on the host.
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

from clipwise.lipschitz.matrix_norms import EPS, NOTHING, gram_bounds, is_quick, iterations_for

_FILLED_UP = (32, 128)  # sizes to which smaller matrices are padded

Number = Tensor | float  # a float64 scalar tensor, possibly on a device, or a float


class Wanted(ABC):
    """A certified norm in two steps: operations on the device, then arithmetic on the host."""

    @abstractmethod
    def numbers(self) -> list[Number]:
        """The inputs of `certified`, on the device or on the host."""

    @abstractmethod
    def certified(self, numbers: Sequence[float]) -> float:
        """An upper bound on the norm; inf or NaN if an entry is not finite."""

    def __float__(self) -> float:
        return measured_together([self])[0]


@dataclass(frozen=True)
class Length(Wanted):
    """The root of a sum of `terms` squares, computed in float64."""

    length: Tensor
    terms: int

    def numbers(self) -> list[Number]:
        return [self.length]

    def certified(self, numbers: Sequence[float]) -> float:
        (length,) = numbers
        return _rounded_up(length, self.terms)


@dataclass(frozen=True)
class Vector(Wanted):
    """The norm of a tensor as one vector. Several on a CPU take one operation."""

    values: Tensor

    def numbers(self) -> list[Number]:
        return [torch.linalg.vector_norm(self.values, dtype=torch.float64)]

    def certified(self, numbers: Sequence[float]) -> float:
        (length,) = numbers
        return _rounded_up(length, self.values.numel())


@dataclass(frozen=True)
class Spectral(Wanted):
    """The largest spectral norm of several matrices, float64 [g, m, n]. See `measured_together` for `numbers`.

    The computed G = A A^T has an error of at most 4 (n + 8) u |A|_F^2, and |A|_F^2 is the trace, so

        |A|^2 <= |G| + 4 (n + 8) u |A|_F^2.

    LAPACK's largest eigenvalue of G has an error of at most p(m) u |G|, with p a modest polynomial.
    """

    matrices: Tensor

    @cached_property
    def gram(self) -> Tensor:
        """[g, m, m], m the smaller side."""
        a = self.matrices if self.matrices.shape[-2] <= self.matrices.shape[-1] else self.matrices.mT
        return a @ a.mT

    @property
    def is_quick(self) -> bool:
        """Whether the norm is computed from eigenvalues."""
        return is_quick(self.gram)

    @cached_property
    def squares(self) -> list[list[float]]:
        """The diagonals of the Gram matrices, on the host: [g][m]."""
        found: list[list[float]] = self.gram.diagonal(0, -2, -1).tolist()
        return found

    @cached_property
    def trace(self) -> Number:
        """|A|_F^2 summed over all matrices. Not finite if an entry is not."""
        return sum(map(sum, self.squares)) if self.is_quick else self.gram.diagonal(0, -2, -1).sum()

    def numbers(self) -> list[Number]:
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


@dataclass(frozen=True)
class Frobenius(Wanted):
    """The largest Frobenius norm of the same matrices."""

    of: Spectral

    def numbers(self) -> list[Number]:
        """The largest square, and the trace: max() ignores NaN, and a sum does not."""
        if self.of.is_quick:
            return [max(map(sum, self.of.squares)), self.of.trace]
        return [self.of.gram.diagonal(0, -2, -1).sum(-1).amax(), self.of.trace]

    def certified(self, numbers: Sequence[float]) -> float:
        square, trace = numbers
        return _rounded_up(math.sqrt(square), self._terms()) if math.isfinite(trace) else trace

    def _terms(self) -> int:
        return self.of.matrices[0].numel()


@dataclass(frozen=True)
class LongestRow(Frobenius):
    """The norm of their longest row; the matrices must not be taller than wide."""

    def __post_init__(self) -> None:
        assert self.of.matrices.shape[-2] <= self.of.matrices.shape[-1], "the diagonal has the columns"

    def numbers(self) -> list[Number]:
        if self.of.is_quick:
            return [max(map(max, self.of.squares)), self.of.trace]
        return [self.of.gram.diagonal(0, -2, -1).amax(), self.of.trace]

    def _terms(self) -> int:
        return self.of.matrices.shape[-1]


def _rounded_up(length: float, terms: int) -> float:
    return length * (1 + (terms + 16) * EPS) + NOTHING


@torch.no_grad()
def measured_together(wanted: Sequence[Tensor | Wanted]) -> list[float]:
    """Each norm as a float. A tensor is used as it is."""
    tops = _largest_eigenvalues([w for w in wanted if isinstance(w, Spectral) and w.matrices.numel()])
    lengths = _lengths([w for w in wanted if isinstance(w, Vector)])
    groups: list[list[Number]] = []
    for w in wanted:
        if isinstance(w, Tensor):
            groups.append([w.reshape(())])
        elif id(w) in lengths:
            groups.append([lengths[id(w)]])
        elif isinstance(w, Spectral):
            groups.append([tops[id(w)], w.trace] if id(w) in tops else [])
        else:
            groups.append(w.numbers())
    far = [number for group in groups for number in group if isinstance(number, Tensor)]
    values = iter(torch.stack(far).tolist() if far else [])
    found: list[float] = []
    for w, group in zip(wanted, groups, strict=True):
        here = [next(values) if isinstance(number, Tensor) else number for number in group]
        found.append(0.0 if not here else here[0] if isinstance(w, Tensor) else w.certified(here))
    return found


def _lengths(vectors: Sequence[Vector]) -> dict[int, Tensor]:
    """The norms of vectors on a CPU, by id. On other devices the accumulation dtype is not documented."""
    near = [v for v in vectors if v.values.device.type == "cpu"]
    found = torch._foreach_norm([v.values for v in near], 2, torch.float64) if near else []
    return dict(zip(map(id, near), found, strict=True))


def _largest_eigenvalues(spectral: Sequence[Spectral]) -> dict[int, Number]:
    """An upper bound on the largest eigenvalue of each computed Gram matrix, up to LAPACK's rounding."""
    found: dict[int, Number] = {}
    together: dict[int, list[Spectral]] = {}
    for one in spectral:
        if one.gram.shape[-1] == 1:
            found[id(one)] = one.gram.amax()
        elif not one.is_quick:
            together.setdefault(_filled_side(one.gram), []).append(one)
        elif math.isfinite(one.trace):
            found[id(one)] = max(row[-1] for row in torch.linalg.eigvalsh(one.gram).tolist())
        else:
            found[id(one)] = one.trace
    for side, those in together.items():
        pads = [side - one.gram.shape[-1] for one in those]
        stack = torch.cat([F.pad(one.gram, (0, pad, 0, pad)) for one, pad in zip(those, pads, strict=True)])
        bounds = gram_bounds(stack, iterations_for(side) - 1)  # G is the first iterate
        for one, some in zip(those, torch.split(bounds, [len(one.gram) for one in those]), strict=True):
            found[id(one)] = some.amax()
    return found


def _filled_side(gram: Tensor) -> int:
    side = gram.shape[-1]
    if gram.device.type == "cpu":
        return side  # on a CPU, arithmetic costs more than a launch
    return next((filled for filled in _FILLED_UP if side <= filled), side)
