"""Certified upper bounds of spectral norms, including rounding errors.

Power iteration approaches the norm from below, so a sensitivity based on it would be too small. The methods here
approach it from above.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
