"""Clipped linear layers, over any number of positions, and clipped convolutions.

Convolutions have any number of dimensions, padding, stride, dilation and groups. The output at position p depends on a
window x_p of the input, and dW_c = sum_p g_cp x_p for every filter c. Let m be the largest number of times that one
window contains a pixel (1, unless padding repeats pixels), and `cover` the largest number of times that all windows
together do. Then

    |x_p| <= sqrt(m) |x|              so  |dW| <= sqrt(m) |x| |(|g_c|_1)_c|        (L12)
    sum_p |x_p|^2 <= cover |x|^2      so  |dW| <= sqrt(cover) |x| |g|              (L2)
    |dW| <= |(sum_p |x_p| |g_cp|)_c|  which is never above either of them          (windows)

The last bound implies L2 by Minkowski's and Cauchy's inequalities, and L12 by |x_p| <= sqrt(m) |x|.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.gradients.forms import at_least_float32
from clipwise.kernels.measures import measures
from clipwise.layers.clipped.layer import ClipConstants, fits, lengths, squared_lengths
from clipwise.layers.clipped.linear_map import ClippedMapLayer, Map, MapRole


class Matrix(Map):
    """x_t -> W x_t at every position t: |dW| = |sum_t g_t x_t^T| <= |x| |g|, with equality at one position."""

    def forward(self, seen: Tensor, weight: Tensor) -> Tensor:
        z: Tensor = F.linear(seen, weight)
        return z

    def pull_back(
        self, h: Tensor, seen: Tensor, weight: Tensor, of_input: bool, of_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        dx: Tensor | None = h @ weight if of_input else None
        dw: Tensor | None = None
        if of_weight:
            dw = h.reshape(-1, h.shape[-1]).t() @ seen.reshape(-1, seen.shape[-1])
        return dx, dw

    def squares(self, x: Tensor) -> Tensor:
        square = squared_lengths(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]))
        return square.view(len(x), 1, math.prod(x.shape[1:-1]))

    def window_lengths(self, squares: Tensor) -> Tensor:
        return squares.sqrt()

    def channels(self, z: Tensor) -> Tensor:
        return z.unsqueeze(-1) if z.dim() == 2 else z.flatten(1, -2).mT

    def gradient_norm(self, sizes: Tensor, lengths_BGP: Tensor) -> Tensor:
        if lengths_BGP.shape[-1] == 1:
            return lengths(sizes) * lengths_BGP[:, 0, 0]
        return super().gradient_norm(sizes, lengths_BGP)

    def bias_view(self, bias: Tensor, z: Tensor) -> Tensor:
        return bias


class ClippedLinear(ClippedMapLayer):
    """`nn.Linear`, clipped: (B, ..., in) to (B, ..., out)."""

    def _take(self, constants: ClipConstants) -> None:
        self._role = MapRole(self, constants, map=Matrix())


AnyConvolution = nn.Conv1d | nn.Conv2d | nn.Conv3d

_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_PADDED = {"zeros": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}
_PADDING = -1


class Convolution(Map):
    """x -> W * x, with the geometry of one module."""

    def __init__(self, module: AnyConvolution) -> None:
        self.mode, self.groups = module.padding_mode, module.groups
        self.kernel = tuple(module.weight.shape[2:])  # torch too uses the weight's shape, not kernel_size
        self.stride, self.dilation = (self._each(n) for n in (module.stride, module.dilation))
        self.around = self._padding_of(module)
        # In the order of F.pad: last dimension first.
        self.listed = listed = [n for pair in self.around[::-1] for n in pair]
        # Whether torch's convolution does the padding: zeros, the same number on both sides.
        self.is_direct = self.mode == "zeros" and all(a == b for a, b in self.around)
        self.inner = tuple(a for a, _ in self.around) if self.is_direct else (0,) * len(self.kernel)
        # Other zero padding is added once and saved: it changes neither norms nor products.
        self.adds_zeros = self.mode == "zeros" and not self.is_direct
        self.repeats = self.mode != "zeros" and any(listed)

    def _each(self, given: int | tuple[int, ...]) -> tuple[int, ...]:
        """One number per dimension; an attribute of the module may be a single number."""
        return (given,) * len(self.kernel) if isinstance(given, int) else tuple(given)

    def _padding_of(self, module: AnyConvolution) -> list[tuple[int, int]]:
        """(before, after) per dimension, as torch pads; zero padding follows the attribute `padding`."""
        if self.mode != "zeros":
            listed = module._reversed_padding_repeated_twice
            return [(listed[i], listed[i + 1]) for i in range(0, len(listed), 2)][::-1]
        if module.padding == "same":
            missing = [d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True)]
            return [(n // 2, n - n // 2) for n in missing]
        return [(n, n) for n in self._each(0 if isinstance(module.padding, str) else module.padding)]

    def seen(self, x: Tensor) -> Tensor:
        return F.pad(x, self.listed) if self.adds_zeros else x

    def of_input(self, seen: Tensor) -> Tensor:
        if self.adds_zeros:
            for axis, (before, after) in enumerate(self.around, start=2):
                seen = seen.narrow(axis, before, seen.shape[axis] - before - after)
        return seen

    def forward(self, seen: Tensor, weight: Tensor) -> Tensor:
        convolve = _CONVOLVE[len(self.kernel)]
        padded = F.pad(seen, self.listed, self.mode) if self.repeats else seen
        return convolve(padded, weight, None, self.stride, self.inner, self.dilation, self.groups)

    def pull_back(
        self, h: Tensor, seen: Tensor, weight: Tensor, of_input: bool, of_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        start = padded = seen
        if self.repeats:
            with torch.enable_grad():
                start = seen.detach().requires_grad_(of_input)
                padded = F.pad(start, self.listed, self.mode)
        settings = self.stride, self.inner, self.dilation, False, [0] * len(self.kernel), self.groups
        dx, dw, _ = torch.ops.aten.convolution_backward(
            h, padded.detach(), weight, None, *settings, [of_input, of_weight, False]
        )
        if of_input and self.repeats:
            (dx,) = torch.autograd.grad(padded, start, dx)
        return (dx if of_input else None), (dw if of_weight else None)

    def upstream_times(self, x_shape: torch.Size) -> tuple[float, float]:
        most, cover = self.counts(tuple(x_shape[2:]))
        return math.sqrt(most), math.sqrt(cover)

    def squares(self, x: Tensor) -> Tensor:
        per_group = x.reshape(len(x), self.groups, x.shape[1] // self.groups, *x.shape[2:])
        if fits(x):
            found = measures(per_group.flatten(3).flatten(0, 1).mT, square=True).square
            assert found is not None
            return found.view(len(x), self.groups, *x.shape[2:])
        per_group = at_least_float32(per_group)
        square = per_group.square().sum(2).double()
        if not square.is_cuda and not math.isfinite(float(square.sum())):  # overflow in float32
            square = per_group.double().square().sum(2)
        # Allow for squares that underflow.
        return square.add_(per_group.shape[2] * torch.finfo(per_group.dtype).tiny)

    def window_lengths(self, squares: Tensor) -> Tensor:
        if any(self.listed):
            squares = F.pad(squares, self.listed, "constant" if self.mode == "zeros" else self.mode)
        for axis, (k, s, d) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            squares = squares.unfold(2 + axis, d * (k - 1) + 1, s)[..., ::d].sum(-1)
        return squares.flatten(2).sqrt()

    def channels(self, z: Tensor) -> Tensor:
        return z.flatten(2)

    def bias_view(self, bias: Tensor, z: Tensor) -> Tensor:
        return bias.view(-1, *[1] * (z.dim() - 2))

    def counts(self, size: tuple[int, ...]) -> tuple[int, int]:
        """m and `cover` for inputs of a size: products over the dimensions."""
        each = zip(size, self.kernel, self.stride, self.dilation, self.around, strict=True)
        found = [window_counts(n, k, s, d, *around, self.mode) for n, k, s, d, around in each]
        return math.prod(most for most, _, _ in found), math.prod(cover for _, cover, _ in found)


@lru_cache(maxsize=1024)
def window_counts(
    n: int, k: int, s: int, d: int, before: int, after: int = 0, mode: str = "zeros", windows: int | None = None
) -> tuple[int, int, int]:
    """m, `cover` and the most pixels in a window, of one dimension; by default for all windows that fit."""
    fill = {"constant_values": _PADDING} if mode == "zeros" else {}
    pixel_at = np.pad(np.arange(n), (before, after), mode=_PADDED[mode], **fill)  # type: ignore[call-overload]
    if windows is None:
        windows = max(0, (len(pixel_at) - d * (k - 1) - 1) // s + 1)
    in_all = np.zeros(n, dtype=int)
    most = taps = 0
    for q in range(windows):
        held = pixel_at[q * s : q * s + d * (k - 1) + 1 : d]
        here = np.bincount(held[held != _PADDING], minlength=n)
        most, taps = max(most, int(here.max(initial=0))), max(taps, int(here.sum()))
        in_all += here
    return most, int(in_all.max(initial=0)), taps


class ClippedConvolution(ClippedMapLayer):
    """`nn.Conv1d`, `2d` or `3d`, clipped: (B, in, ...) to (B, out, ...)."""

    layer: AnyConvolution

    def _take(self, constants: ClipConstants) -> None:
        self._role = MapRole(self, constants, map=Convolution(self.layer))

    @property
    def least_dimensions(self) -> int:
        return 2 + len(self.layer.kernel_size)
