"""Scale factors of the examples, from measured norms, in one launch each: the formulas of layers/clipped/layer.py.

    input_factors      |x| and s = min(1, C / |x|)
    gradient_factors   nu = min(most, C / n), with n = m (a |first| op b |second|), op the minimum or the maximum

All in float64. The factor of an example that is not finite is 0. Legend: B examples, K channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clipwise.kernels import usable
from clipwise.kernels.launch import Pointer, blocks, constexpr, device_of, jit, power_of_two, tl

_EXAMPLES = 128  # examples per program, if nothing is summed
_TILE = 2048  # entries of a tile in a sum


@dataclass(frozen=True)
class Limits:
    """Constants of layers/clipped/layer.py: a scaled vector aims at `aim` times its bound, and so on."""

    aim: float
    least: float
    smallest: float
    smallest_input: float


@dataclass(frozen=True, eq=False)
class Norms:
    """n of each example: the minimum or the maximum of a |first| and b |second|, times m.

    Args:
        first: rows [B, K], or None.
        second: rows [B, K], or squares to be summed if `has_squares`, or None.
        first_times: a.
        second_times: b.
        takes_larger: the maximum instead of the minimum.
        times: m, one number per example.
    """

    first: Tensor | None = None
    second: Tensor | None = None
    has_squares: bool = False
    first_times: float = 1.0
    second_times: float = 1.0
    takes_larger: bool = False
    times: Tensor | None = None

    def of_examples(self) -> Tensor:
        """n, [B] in float64."""
        found = []
        if self.first is not None:
            found.append(self.first_times * torch.linalg.vector_norm(self.first, dim=1, dtype=torch.float64))
        if self.second is not None:
            squares = self.second if self.has_squares else self.second.double().square()
            found.append(self.second_times * squares.double().sum(1).sqrt())
        norm_B: Tensor = found[0]
        if len(found) > 1:
            norm_B = torch.maximum(*found) if self.takes_larger else torch.minimum(*found)
        return norm_B if self.times is None else norm_B * self.times


def input_factors(square_B: Tensor, bound: float, limits: Limits) -> tuple[Tensor, Tensor]:
    """|x| and s of each example, from |x|^2."""
    if not usable(square_B) or square_B.numel() == 0:
        return input_factors_in_torch(square_B, bound, limits)
    B = len(square_B)
    norm_B, scale_B = torch.empty_like(square_B), torch.empty_like(square_B)
    with device_of(square_B):
        _write_input_factors[(blocks(B, _EXAMPLES),)](
            square_B, norm_B, scale_B, B, bound, limits.aim * bound, limits.smallest_input,
            EXAMPLES=_EXAMPLES,
        )  # fmt: skip
    return norm_B, scale_B


def input_factors_in_torch(square_B: Tensor, bound: float, limits: Limits) -> tuple[Tensor, Tensor]:
    """The twin of `input_factors`."""
    norm_B = square_B.sqrt()
    scale_B = torch.where(norm_B <= bound, 1.0, limits.aim * bound / norm_B)
    return norm_B, torch.where(torch.isfinite(norm_B) & (scale_B >= limits.smallest_input), scale_B, 0.0)


def gradient_factors(norms: Norms, bound: float | None, most: float, limits: Limits) -> Tensor:
    """nu of each example, at most `most`. Without a bound it is 1, or 0 for an example that is not finite."""
    looked_at = norms.first if norms.first is not None else norms.second
    assert looked_at is not None
    if not usable(looked_at) or looked_at.numel() == 0:
        return gradient_factors_in_torch(norms, bound, most, limits)
    B, K = looked_at.shape
    columns = min(power_of_two(K), _TILE)
    rows = max(1, min(_TILE // columns, power_of_two(B)))
    first, second = (looked_at if t is None else t for t in (norms.first, norms.second))
    nu_B = torch.empty(B, dtype=torch.float64, device=looked_at.device)
    with device_of(looked_at):
        _write_gradient_factors[(blocks(B, rows),)](
            first, second, nu_B if norms.times is None else norms.times, nu_B, B, K, *first.stride(),
            *second.stride(), norms.first_times, norms.second_times,
            0.0 if bound is None else limits.aim * bound, most, limits.least, limits.smallest,
            HAS_FIRST=norms.first is not None, HAS_SECOND=norms.second is not None,
            HAS_SQUARES=norms.has_squares, TAKES_LARGER=norms.takes_larger, TIMES=norms.times is not None,
            CLIPS=bound is not None, ROWS=rows, COLUMNS=columns,
        )  # fmt: skip
    return nu_B


def gradient_factors_in_torch(norms: Norms, bound: float | None, most: float, limits: Limits) -> Tensor:
    """The twin of `gradient_factors`."""
    norm_B = norms.of_examples()
    if bound is None:
        return torch.isfinite(norm_B).double()
    nu_B = (limits.aim * bound / norm_B).clamp(max=most)
    nu_B = torch.where(norm_B <= limits.least, 1.0, nu_B)
    return torch.where(torch.isfinite(norm_B) & (nu_B >= limits.smallest), nu_B, 0.0)


@jit
def _write_input_factors(
    square_B: Pointer, norm_B: Pointer, scale_B: Pointer,
    B: int, bound: float, aimed: float, smallest: float,
    EXAMPLES: constexpr,
) -> None:  # fmt: skip
    b = tl.program_id(0) * EXAMPLES + tl.arange(0, EXAMPLES)
    norm = tl.sqrt(tl.load(square_B + b, mask=b < B, other=0.0))
    scale = tl.where(norm <= bound, 1.0, aimed / norm)
    scale = tl.where((norm < float("inf")) & (scale >= smallest), scale, 0.0)  # false for NaN
    tl.store(norm_B + b, norm, mask=b < B)
    tl.store(scale_B + b, scale, mask=b < B)


@jit
def _write_gradient_factors(
    first: Pointer, second: Pointer, times_B: Pointer, nu_B: Pointer,
    B: int, K: int, first_B: int, first_K: int, second_B: int, second_K: int, first_times: float,
    second_times: float, aimed: float, most: float, least: float, smallest: float,
    HAS_FIRST: constexpr, HAS_SECOND: constexpr, HAS_SQUARES: constexpr, TAKES_LARGER: constexpr,
    TIMES: constexpr, CLIPS: constexpr, ROWS: constexpr, COLUMNS: constexpr,
) -> None:  # fmt: skip
    b_R = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    first_RK = tl.zeros([ROWS, COLUMNS], tl.float64)
    second_RK = tl.zeros([ROWS, COLUMNS], tl.float64)
    for k in range(0, K, COLUMNS):
        k_K = (k + tl.arange(0, COLUMNS)).to(tl.int64)
        inside_RK = (b_R < B)[:, None] & (k_K < K)[None, :]
        if HAS_FIRST:
            at_RK = first + b_R[:, None] * first_B + k_K[None, :] * first_K
            value_RK = tl.load(at_RK, mask=inside_RK, other=0.0).to(tl.float64)
            first_RK += value_RK * value_RK
        if HAS_SECOND:
            at_RK = second + b_R[:, None] * second_B + k_K[None, :] * second_K
            value_RK = tl.load(at_RK, mask=inside_RK, other=0.0).to(tl.float64)
            second_RK += value_RK if HAS_SQUARES else value_RK * value_RK
    norm_R = tl.sqrt(tl.sum(first_RK, axis=1)) * first_times
    if HAS_SECOND:
        other_R = tl.sqrt(tl.sum(second_RK, axis=1)) * second_times
        if not HAS_FIRST:
            norm_R = other_R
        elif TAKES_LARGER:
            norm_R = tl.where(norm_R < other_R, other_R, norm_R) + 0.0 * other_R  # NaN if either is
        else:
            norm_R = tl.where(norm_R < other_R, norm_R, other_R)
    if TIMES:
        norm_R = norm_R * tl.load(times_B + b_R, mask=b_R < B, other=0.0)
    is_finite_R = norm_R < float("inf")  # false for NaN
    nu_R = tl.where(is_finite_R, 1.0, 0.0).to(tl.float64)
    if CLIPS:
        wanted_R = aimed / norm_R
        wanted_R = tl.where(wanted_R < most, wanted_R, most)
        wanted_R = tl.where(norm_R <= least, 1.0, wanted_R)
        nu_R = tl.where(is_finite_R & (wanted_R >= smallest), wanted_R, 0.0)
    tl.store(nu_B + b_R, nu_R.to(tl.float64), mask=b_R < B)
