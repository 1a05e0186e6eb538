"""Certified upper bounds of spectral norms, including rounding errors.

Power iteration approaches the norm from below, so a sensitivity based on it would be too small. The methods here
approach it from above.

All norms that rules need are measured together, with one copy from the device. One Gram matrix A A^T gives three: its
largest eigenvalue |A|^2, its trace |A|_F^2 and, on its diagonal, the squared row norms. On a CPU, LAPACK computes the
eigenvalues. On an accelerator Gram matrices are zero-padded to a few sizes, which changes no norm, and iterated in
batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

EPS = torch.finfo(torch.float64).eps
NOTHING = 1e-150
_SMALL, _FEW = 256, 8  # largest side and number of matrices for eigenvalues on a CPU
# Gram iterations: the bound is at most r^(1 / 2^9) times the norm, 1.009 for rank 100, and usually far less.
_ITERATIONS = 8
_FEWER, _LARGE = 6, 192  # for larger matrices, with costly products: 1.06 for rank 1000


def spectral_bounds(matrices: Tensor, iterations: int | None = None) -> Tensor:
    """An upper bound on the spectral norm of each matrix [..., m, n]; float64 [...]. Not finite if an entry is not.

    Small matrices on a CPU use the eigenvalues of a Gram matrix. Otherwise it is the smallest of Gram iteration, the
    Frobenius norm and sqrt(|W|_1 |W|_inf).
    """
    a = _wide(matrices)
    if a.numel() == 0:
        return torch.zeros(a.shape[:-2], dtype=torch.float64, device=a.device)
    if iterations is None and is_quick(a):
        whole = frobenius_norms(a)
        return eigenvalue_bounds(a, whole) if bool(torch.isfinite(whole).all()) else whole
    size = a.shape[-2] + a.shape[-1]
    sums = a.abs()
    crossed = (sums.sum(-1).amax(-1) * sums.sum(-2).amax(-1)).sqrt()  # Riesz-Thorin between 1 and inf
    found = torch.minimum(frobenius_norms(a), crossed) * (1 + size * EPS)
    if min(a.shape[-2:]) == 1:
        return found  # then the Frobenius norm is the spectral norm
    if iterations is None:
        iterations = iterations_for(min(a.shape[-2:]))
    return torch.minimum(found, gram_bounds(a, iterations))


def iterations_for(side: int) -> int:
    """The number of Gram iterations, from the smaller side of a matrix."""
    return _ITERATIONS if side <= _LARGE else _FEWER


def eigenvalue_bounds(a: Tensor, whole: Tensor) -> Tensor:
    """|A|^2 = |A A^H|, from its eigenvalues; `whole` is a finite upper bound on |A|_F.

    With A scaled to |A|_F = 1, the computed A A^H has an error of at most gamma = c n u in Frobenius norm. LAPACK's
    eigenvalues are those of a matrix within p(m) u |A A^H| of its input, with p a modest polynomial.
    """
    if a.shape[-2] > a.shape[-1]:
        a = a.mH
    m, n = a.shape[-2:]
    if m == 1:
        return whole
    a = a / whole[..., None, None]
    squares: Tensor = torch.linalg.eigvalsh(a @ a.mH)[..., -1].clamp(min=0)
    return whole * (squares * (1 + 16 * m * EPS) + (4 * (n + 8) + 16 * m) * EPS).sqrt() * (1 + 8 * EPS)


def frobenius_norms(matrices: Tensor) -> Tensor:
    """An upper bound on the Frobenius norm of each matrix [..., m, n]; float64 [...]."""
    a = _wide(matrices)
    # In float64, squares of float32 numbers neither underflow nor overflow; numbers below 1e-154 are within NOTHING.
    norms: Tensor = torch.linalg.vector_norm(a, dim=(-2, -1))
    return norms * (1 + (a.shape[-2] * a.shape[-1] + 8) * EPS) + NOTHING


def gram_bounds(matrices: Tensor, iterations: int) -> Tensor:
    """Gram iteration: repeat |A|^2 = |A A^H|, then use |.| <= |.|_F. An upper bound at every iteration.

    With A_0 = A / |A|_F and A_i = G_i / |G_i|_F, G_i the *computed* A_{i-1} A_{i-1}^H, whose rounding error is
    below e = gamma |A_{i-1}|_F^2 = gamma in Frobenius norm, gamma = c n u for inner products of n terms:

        |A_{i-1}|^2 <= |G_i| + e = |G_i|_F |A_i| + e,    |A_last| <= 1,

    which is evaluated from the last iteration to the first.
    """
    a = _wide(matrices)
    if a.shape[-2] > a.shape[-1]:
        a = a.mH
    whole = frobenius_norms(a)
    a = a / whole[..., None, None]  # never 0: it is at least NOTHING
    sizes: list[Tensor] = []
    errors: list[float] = []
    for _ in range(iterations):
        errors.append(4 * (a.shape[-1] + 8) * EPS)
        a = a @ a.mH
        sizes.append(frobenius_norms(a))
        a = a / sizes[-1][..., None, None]
    bound = torch.ones_like(whole)
    for size, error in zip(reversed(sizes), reversed(errors), strict=True):
        bound = (size * bound + error).sqrt()
    return whole * bound * (1 + 16 * EPS)


def is_quick(a: Tensor) -> bool:
    """Whether eigenvalues are faster than Gram iteration, whose small steps are dominated by Python overhead."""
    few = a.numel() <= _FEW * a.shape[-2] * a.shape[-1]
    return a.device.type == "cpu" and few and min(a.shape[-2:]) <= _SMALL


def _wide(matrices: Tensor) -> Tensor:
    """In float64 or complex128; lower precisions convert exactly."""
    kind = torch.complex128 if matrices.is_complex() else torch.float64
    return matrices.detach().to(kind)


_FILLED_UP = (32, 128)  # sizes to which smaller matrices are padded

Number = Tensor | float  # a float64 scalar tensor, possibly on a device, or a float


@dataclass(frozen=True, eq=False)
class Length:
    """A certified norm in two steps: `numbers` are computed on the device, and `certified` bounds the norm on the host.

    The bound is inf or NaN if an entry is not finite.
    """

    numbers: Sequence[Number]
    certified: Callable[..., float]


@dataclass(frozen=True, eq=False)
class Spectral:
    """The largest spectral norm of several matrices, float64 [g, m, n], from the largest eigenvalue of G = A A^T.

    The computed G has an error of at most 4 (n + 8) u |A|_F^2, and |A|_F^2 is the trace, so

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

    def certified(self, top: float, trace: float) -> float:
        if not math.isfinite(trace):
            return trace
        count, m, n = self.matrices.shape[0], min(self.matrices.shape[1:]), max(self.matrices.shape[1:])
        rounding = (4 * (n + 8) + count * m) * EPS
        whole = trace * (1 + 2 * rounding)
        square = max(top, 0.0) * (1 + 16 * m * EPS) + (rounding + 16 * m * EPS) * whole
        return math.sqrt(min(square, whole)) * (1 + 8 * EPS) + NOTHING


Wanted = Tensor | Length | Spectral  # a tensor is used as it is


def length(found: Tensor, terms: int) -> Length:
    """The root of a sum of `terms` squares, computed in float64."""
    return Length([found], lambda length: _rounded_up(length, terms))


def largest_frobenius(of: Spectral) -> Length:
    """The largest Frobenius norm of the same matrices."""
    square = max(map(sum, of.squares)) if of.is_quick else of.gram.diagonal(0, -2, -1).sum(-1).amax()
    return _root(square, of, of.matrices[0].numel())


def longest_row(of: Spectral) -> Length:
    """The norm of their longest row; the matrices must not be taller than wide."""
    assert of.matrices.shape[-2] <= of.matrices.shape[-1], "the diagonal has the columns"
    square = max(map(max, of.squares)) if of.is_quick else of.gram.diagonal(0, -2, -1).amax()
    return _root(square, of, of.matrices.shape[-1])


def _root(square: Number, of: Spectral, terms: int) -> Length:
    """The root of a largest square. The trace shows NaN, which max() may ignore."""

    def certified(square: float, trace: float) -> float:
        return _rounded_up(math.sqrt(square), terms) if math.isfinite(trace) else trace

    return Length([square, of.trace], certified)


def _rounded_up(length: float, terms: int) -> float:
    return length * (1 + (terms + 16) * EPS) + NOTHING


@torch.no_grad()
def measured_together(wanted: Sequence[Wanted]) -> list[float]:
    """Each norm as a float."""
    tops = _largest_eigenvalues([w for w in wanted if isinstance(w, Spectral) and w.matrices.numel()])
    groups: list[Sequence[Number]] = []
    for w in wanted:
        if isinstance(w, Tensor):
            groups.append([w.reshape(())])
        elif isinstance(w, Spectral):
            groups.append([tops[id(w)], w.trace] if id(w) in tops else [])
        else:
            groups.append(w.numbers)
    far = [number for group in groups for number in group if isinstance(number, Tensor)]
    values = iter(torch.stack(far).tolist() if far else [])
    found: list[float] = []
    for w, group in zip(wanted, groups, strict=True):
        here = [next(values) if isinstance(number, Tensor) else number for number in group]
        found.append(0.0 if not here else here[0] if isinstance(w, Tensor) else w.certified(*here))
    return found


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
