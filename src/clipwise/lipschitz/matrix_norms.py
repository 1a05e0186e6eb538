"""Certified upper bounds of spectral norms: no rounding and no early stop brings them below the true norm.

Power iteration approaches the norm from below, so a sensitivity that rests on it is too small. What is here
approaches it from above.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPS = torch.finfo(torch.float64).eps
NOTHING = 1e-150
_SMALL, _FEW = 256, 8  # up to this side, and for so many matrices, eigenvalues are quick on a CPU
# Gram iterations: at most r^(1 / 2^9) above, which is 1.009 for rank 100, and mostly far less.
_ITERATIONS = 8
_FEWER, _LARGE = 6, 192  # for larger matrices, whose products cost: 1.06 for rank 1000


def spectral_bounds(matrices: Tensor, iterations: int | None = None) -> Tensor:
    """At least the spectral norm of each matrix [..., m, n]; float64 [...]. An infinite or NaN entry gives inf or NaN.

    On a CPU from the eigenvalues of a small Gram matrix. Else the smallest of Gram iteration, the Frobenius norm
    and sqrt(|W|_1 |W|_inf).
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
    """How many Gram iterations a matrix gets, by its smaller side."""
    return _ITERATIONS if side <= _LARGE else _FEWER


def eigenvalue_bounds(a: Tensor, whole: Tensor) -> Tensor:
    """|A|^2 = |A A^H|, from its eigenvalues; `whole` is at least |A|_F, and finite.

    With A scaled to |A|_F = 1, the computed A A^H is within gamma = c n u of the true one, in Frobenius norm. LAPACK's
    eigenvalues are those of a matrix within p(m) u |A A^H| of what it was given, p a modest polynomial.
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
    """At least the Frobenius norm of each matrix [..., m, n]; float64 [...]."""
    a = _wide(matrices)
    # In float64 squares of float32 numbers neither vanish nor overflow; those below 1e-154 are within NOTHING.
    norms: Tensor = torch.linalg.vector_norm(a, dim=(-2, -1))
    return norms * (1 + (a.shape[-2] * a.shape[-1] + 8) * EPS) + NOTHING


def gram_bounds(matrices: Tensor, iterations: int) -> Tensor:
    """Gram iteration: |A|^2 = |A A^H|, again and again, then |.|_F >= |.|. An upper bound at every iteration.

    With A_0 = A / |A|_F and A_i = G_i / |G_i|_F, G_i the *computed* A_{i-1} A_{i-1}^H, whose rounding error is
    below e = gamma |A_{i-1}|_F^2 = gamma in Frobenius norm, gamma = c n u for inner products of n terms:

        |A_{i-1}|^2 <= |G_i| + e = |G_i|_F |A_i| + e,    |A_last| <= 1,

    which is unrolled from the last to the first.
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
    """Whether eigenvalues take less time than Gram iteration, whose many small steps wait for the interpreter."""
    few = a.numel() <= _FEW * a.shape[-2] * a.shape[-1]
    return a.device.type == "cpu" and few and min(a.shape[-2:]) <= _SMALL


def _wide(matrices: Tensor) -> Tensor:
    """In the widest type; float32 and the halves fit in without rounding."""
    kind = torch.complex128 if matrices.is_complex() else torch.float64
    return matrices.detach().to(kind)
