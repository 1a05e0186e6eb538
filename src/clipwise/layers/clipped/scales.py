"""The numbers by which examples are scaled, from upper bounds of norms. All in float64, one an example.

Scaled vectors aim a little below their bound: what is left is room for rounding. Here n is never smaller than the true
norm, and it dominates the sum of the sizes of all terms of a gradient, not only the size of their sum. So the
rounding of a product that torch forms is a small part of n, whatever cancels in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from clipwise import kernels
from clipwise.errors import ConfigurationError
from clipwise.gradients.forms import squared_norms
from clipwise.kernels.factors import Limits, Norms, gradient_factors
from clipwise.kernels.weighted import weighted_sum
from clipwise.layers.clipped import switch
from clipwise.validation.arguments import number

MODES = ("clip", "normalize")
BOUNDS = ("upstream", "gradient")
WEIGHTS, VECTORS = "weights", "vectors"  # what a norm is of: a matrix or a table; a bias, a scale or a shift

# Of a bound. The sums over an example's positions err by less: they run in blocks, at u = 2^-24 a term.
AIM = 1 - 2.0**-10
# Of s and of nu: whoever would be scaled by less counts as 0. Gradients are scaled by s nu, in float32, whose numbers
# have all of their digits from 2^-126 on. Below that they are off by 2^-150, perhaps upwards.
_SMALLEST_INPUT, _SMALLEST = 2.0**-50, 2.0**-76
LEFT_OF_MASS = 2.0**-6
# A gradient that is shorter than this is not brought to its bound by "normalize", but as far below it: it may be
# rounding, which depends on the batch. That of losses of ordinary size, about 2^-24, is made 2^-10 of a bound.
_SHORTEST = 2.0**-14
_LEAST = 2.0**-100  # what is bounded by so little stays as it is: far below any constant
_LONGEST = 2.0**120  # of a gradient that is scaled up: float32 ends at 2^128
_SMALLEST_CONSTANT, _LARGEST_CONSTANT = 1e-10, 1e10
LIMITS = Limits(AIM, _LEAST, _SMALLEST, _SMALLEST_INPUT)  # for kernels with the same formulas


@dataclass(frozen=True)
class Constants:
    """What one layer clips to: C1, C2 and how. See `clip_inputs`."""

    input_norm: float
    grad_norm: float
    mode: str = "clip"
    bound: str = "gradient"

    @property
    def weight_norm(self) -> float:
        """What one example adds to the gradient of the weights, at most: C1 C2."""
        return self.input_norm * self.grad_norm

    @property
    def most(self) -> float:
        """What gradients are scaled by at most: 1 to clip; to normalize, C2 over the shortest one."""
        return 1.0 if self.mode == "clip" else self.grad_norm / _SHORTEST


def along(values_B: Tensor, like: Tensor, axis: int = 0) -> Tensor:
    """One number an example, in the type of a tensor and ready to be multiplied with it."""
    return _on_axis(values_B.to(like.dtype), like, axis)


def _on_axis(values_B: Tensor, like: Tensor, axis: int = 0) -> Tensor:
    shape = [1] * like.dim()
    shape[axis] = -1
    return values_B.view(shape)


def squared_lengths(rows_Rn: Tensor) -> Tensor:
    """At least |row|^2 of each row, in float64, also where squares are beyond float32 (as kernels have it on a GPU)."""
    found_R = squared_norms(rows_Rn)
    if found_R.is_cuda or not len(found_R) or float(found_R.max()) < math.inf:  # (which NaN is not)
        return found_R
    return squared_norms(rows_Rn.double())


def lengths(rows: Tensor) -> Tensor:
    """At least |row| of each example, [B]."""
    if not len(rows):  # a batch may be empty, and no shape follows from nothing
        return torch.zeros(0, dtype=torch.float64, device=rows.device)
    return squared_lengths(rows.reshape(len(rows), -1)).sqrt()


def input_scales(norm_B: Tensor, input_norm: float) -> Tensor:
    """min(1, C1 / |x|): 0 for an example that is not finite or longer than 2^50 C1, which counts as 0."""
    scale_B = (AIM * input_norm / norm_B).masked_fill(norm_B <= input_norm, 1.0)
    return scale_B.masked_fill(~(norm_B <= AIM * input_norm / _SMALLEST_INPUT), 0.0)  # NaN is not <= either


def upstream_scales(norm_B: Tensor, bound: float | None, most: float, of: str = WEIGHTS) -> Tensor:
    """nu = min(most, C / n): what n bounds is then at most C. A norm of 0 stays 0.

    Without a bound nothing is clipped: 1 where the norm is finite, else 0.
    """
    if bound is None:
        return torch.isfinite(norm_B).double()
    switch.compared(of, norm_B, bound)
    nu_B = (AIM * bound / norm_B).clamp(max=most)
    nu_B = nu_B.masked_fill(norm_B <= _LEAST, 1.0)
    return nu_B.masked_fill(~(norm_B <= AIM * bound / _SMALLEST), 0.0)


def kernel_scales(norms: Norms, bound: float | None, most: float) -> Tensor:
    """The same by a kernel, from norms that kernels measured; and a note of it."""
    nu_B = gradient_factors(norms, bound, most, LIMITS)
    switch.noted(nu_B)
    return nu_B


def fits(t: Tensor) -> bool:
    """Whether kernels take this tensor: on a GPU, and not in float64. They do not tell what they compare."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    return kernels.usable(t) and t.numel() > 0 and t.dtype in dtypes and not switch.is_measured()


def surely_none(flags_B: Tensor) -> bool:
    """Whether no flag is set, as far as that can be told at once: nobody waits for a GPU to say so."""
    return not flags_B.is_cuda and not bool(flags_B.any())


def cleaned(t: Tensor, factor_B: Tensor, axis: int = 0) -> Tensor:
    """0 in rows whose factor is 0 (or False), for 0 times NaN is NaN; unless a compiled step notes the factors."""
    if switch.noted(factor_B):
        return t
    if not factor_B.is_cuda and (not len(factor_B) or float(factor_B.min()) > 0):
        return t
    return torch.where(_on_axis(factor_B > 0, t, axis), t, 0)


def scaled(t: Tensor, factor_B: Tensor, axis: int = 0) -> Tensor:
    """Each example times its factor, a new tensor: 0 where that is 0."""
    return cleaned(t, factor_B, axis) * along(factor_B, t, axis)


def clipped_input(x: Tensor, input_norm: float) -> Tensor:
    """x min(1, C1 / |x|) of each example, written in operations that torch can export."""
    norm_B = torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=torch.float64)
    scale_B = input_scales(norm_B, input_norm)
    return torch.where(_on_axis(torch.isfinite(norm_B), x), x * along(scale_B, x), 0)


def weighted_rows(rows_Bn: Tensor, mass_Bn: Tensor | None, c: Constants) -> Tensor:
    """sum_i nu_i row_i, each row being all of an example's gradient: clipped to C2 on its exact norm.

    A row that is left of far larger terms, `mass_Bn` the sums of their sizes, may be nothing but their rounding, and
    rounding may depend on the other examples. It is taken to be at least 2^-6 of them: so what is rounding stays
    small when gradients are normalized. (The keys' bias of attention is such a case: its gradient is 0.)
    """
    bound = c.grad_norm if switch.is_clipping() else None
    if fits(rows_Bn):
        norms = Norms(rows_Bn, mass_Bn, second_times=LEFT_OF_MASS, takes_larger=True)
        return weighted_sum(rows_Bn, kernel_scales(norms, bound, c.most))
    norm_B = lengths(rows_Bn)
    if mass_Bn is not None and bound is not None:
        norm_B = torch.maximum(norm_B, LEFT_OF_MASS * lengths(mass_Bn))
    nu_B = upstream_scales(norm_B, bound, c.most, VECTORS)
    return scaled(rows_Bn, nu_B).sum(0)


def at_least_shortest(lengths_BGP: Tensor, bound: float) -> Tensor:
    """Lengths of what positions look at, in place, none below C / 2^120: then n is at least that times |g|.

    So C / n times g is a number of float32, also where a long gradient meets next to no input.
    """
    return lengths_BGP.clamp_(min=max(bound / _LONGEST, torch.finfo(torch.float32).tiny))


def weighted_channels(sizes_BGcP: Tensor, lengths_BGP: Tensor) -> Tensor:
    """|(sum_p l_p |g_cp|)_c| of each example, where position p has a length l_p for each group of channels.

    `sizes_BGcP` is |g|, and is written over.
    """
    return lengths(sizes_BGcP.mul_(lengths_BGP.to(sizes_BGcP.dtype).unsqueeze(2)).sum(-1))


def clip_constant(name: str, value: object) -> float:
    """A constant to clip to, or an error that names the argument."""
    found = number(name, value, above=0)
    if not _SMALLEST_CONSTANT <= found <= _LARGEST_CONSTANT:
        raise ConfigurationError(
            f"{name}={value!r} is not possible: give a number from {_SMALLEST_CONSTANT:g} to {_LARGEST_CONSTANT:g}."
        )
    return found
