"""Convolutions with few positions and many channels: no gradient is written out, and no window is copied.

A convolution is a linear layer on *windows* of its input: win_t is the input window of output position t, and the
gradient is sum_t g_t win_t^T. So its squared norm is a sum over pairs of positions,

    |gradient|^2 = sum_{t,s} <g_t, g_s> <win_t, win_s>.

The inner product of two windows pairs pixels at the same offset. With P[u, v] = <x_u, x_v>, the inner products of
*pixels*,

    <win_t, win_s> = sum_o P[t stride + o dilation - padding, s stride + o dilation - padding],

where P is 0 outside of the image. This adds copies of P, shifted along its diagonal, one for each offset of the kernel,
one axis after another. Paired pixels differ by a multiple of the stride, so pixels divide into *phases* (their
positions modulo the stride), each with its own small P: with q and r the quotient and the remainder of
(o dilation - padding) / stride, the offset o shifts phase r by q.

A fold (k rows per example) is one more axis, with a kernel of size 1. Groups are separate convolutions, each with a
part of the gradient.

Legend: B examples (b in a chunk), k rows each, T positions of the output, c and p channels of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from clipwise import kernels
from clipwise.gradients.forms.base import Budget, along_first, chunks, roundoff, zeroed
from clipwise.gradients.forms.outer import Product
from clipwise.gradients.geometry import Geometry, positions
from clipwise.gradients.precision import IEEE
from clipwise.kernels.gram import Precision, gram_norms
from clipwise.kernels.operators import operator

GRAM_BYTES = 64 * 2**20  # of inner products at a time
COPY_BYTES = 256 * 2**20  # of windows at a time, on CUDA
_CACHED_BYTES = 8 * 2**20  # the same on a CPU, so that they stay in its caches
# Convolutions may add positions and examples one by one, where a matrix product adds them in blocks. In the worst case,
# all terms equal, so many terms give an error of 1e-5 of their sum. Sums of this many terms are then added.
_TERMS = 1024

# The cost to shift and add a pair of pixels, and to write, measure and sum a number of a gradient, in products of two
# numbers in float64. (Rough: they affect the speed, and no result. Both are limited by memory, which is much slower
# than a GPU's products.)
_MOVED = {"cpu": 8, "cuda": 200}
_WRITTEN = {"cpu": 50, "cuda": 80}


def windows_pay(x_Bk: Tensor, g_Bk: Tensor, geometry: Geometry) -> bool:
    """Whether inner products cost less than gradients that are written out, which need no product in the sum."""
    if geometry.transposed:
        return False
    k, channels, *pixels = x_Bk.shape[1:]
    T = k * g_Bk.shape[3:].numel()
    pairs = k * k
    for axis, size in enumerate(pixels):
        step = geometry.stride[axis]
        pairs *= sum(len(range(rest, size, step)) ** 2 for rest in geometry.shifts(axis))
    device = "cpu" if x_Bk.device.type == "cpu" else "cuda"
    moved = geometry.groups * pairs * (1 + sum(geometry.kernel))
    products = pairs * channels + T**2 * g_Bk.shape[2] + _MOVED[device] * moved
    return products < _WRITTEN[device] * geometry.weight.numel()


class Windows(Product):
    """gradient_i = sum_t g_it win_it^T, of the weight's shape."""

    def __init__(self, x_Bk: Tensor, g_Bk: Tensor, geometry: Geometry) -> None:
        """Inputs [B, k, groups * c, *pixels] and output gradients [B, k, groups * p, *places], of the same dtype."""
        super().__init__()
        self.x, self.g, self.geometry = x_Bk, g_Bk, geometry
        self.batch, self.shape, self.dtype = len(x_Bk), geometry.weight, x_Bk.dtype
        self._together = max(1, _TERMS // (g_Bk.shape[1] * g_Bk.shape[3:].numel()))  # summed in one product

    def squared_norms(self, budget: Budget) -> Tensor:
        place = self.geometry
        square_B, mass_B = window_squares(
            self.x,
            self.g,
            budget.arithmetic.name,
            self.shape,
            place.stride,
            place.padding,
            place.dilation,
            place.groups,
        )
        if budget.arithmetic is not IEEE:
            self._together = max(1, self.batch)  # the sum errs less than its operands
        return self._bound(square_B.sqrt(), mass_B, budget)

    def _in_float64(self, example: int) -> Tensor:
        return self.geometry.weight_gradient(self.x[example].double(), self.g[example].double())

    def weighted_sum(self, w_B: Tensor) -> Tensor:
        scaled = self.g * along_first(self._without_exact(w_B).to(self.dtype), self.g)
        parts = zip(*(torch.split(t, self._together) for t in (self.x, scaled)), strict=True)
        sums = (self.geometry.weight_gradient(x_bk.flatten(0, 1), g_bk.flatten(0, 1)) for x_bk, g_bk in parts)
        total = next(sums)
        for part in sums:
            total += part
        return self._add_exact(total, w_B)

    def instantiate(self, examples: slice) -> Tensor:
        return self.geometry.weight_gradients(self.x[examples], self.g[examples])

    def mass(self, example: int) -> float:
        return float(_squares_and_mass(self.x[example, None], self.g[example, None], self.geometry)[1])

    def mute(self, muted_B: Tensor) -> None:
        self.x, self.g = (zeroed(t, muted_B) for t in (self.x, self.g))
        super().mute(muted_B)


@operator(
    "(Tensor x, Tensor g, str precision, int[] weight, int[] stride, int[] padding, int[] dilation, int groups)"
    " -> (Tensor, Tensor)",
    lambda x, *_: tuple(x.new_empty(len(x), dtype=torch.float64) for _ in range(2)),
)
def window_squares(
    x_Bk: Tensor,
    g_Bk: Tensor,
    precision: Precision,
    weight: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> tuple[Tensor, Tensor]:
    """Upper bounds on |gradient|^2 and on the mass M = sum_t |g_t| |win_t|, [B] in float64."""
    geometry = Geometry(torch.Size(weight), tuple(stride), tuple(padding), tuple(dilation), groups)
    if kernels.usable(x_Bk) and groups == 1 and x_Bk.dtype == torch.float32:
        found = [_by_tensor_cores(x_Bk[c], g_Bk[c], geometry, precision) for c in _copies(x_Bk, g_Bk, geometry)]
    else:
        found = [_squares_and_mass(x_Bk[c], g_Bk[c], geometry) for c in _chunks(x_Bk, g_Bk, geometry)]
    square_B, mass_B = (torch.cat(parts) for parts in zip(*found, strict=True))
    return square_B, mass_B


def _by_tensor_cores(x_bk: Tensor, g_bk: Tensor, geometry: Geometry, precision: Precision) -> tuple[Tensor, Tensor]:
    """From inner products of copied windows: faster on a GPU."""
    return gram_norms(positions(g_bk), geometry.patches(x_bk), precision)  # in any order of features


def _copies(x_Bk: Tensor, g_Bk: Tensor, geometry: Geometry) -> list[slice]:
    """Pieces of the batch with windows that fit into COPY_BYTES."""
    T = g_Bk.shape[1] * g_Bk.shape[3:].numel()
    return chunks(len(x_Bk), geometry.weight[1:].numel() * T * x_Bk.element_size(), COPY_BYTES)


def _squares_and_mass(x_bk: Tensor, g_bk: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """From shifted inner products of pixels.

    Inner products of c and p numbers are added over the offsets o of the kernel, and then T^2 of their products.
    Since sum_o |x_(t+o)| |x_(s+o)| <= |win_t| |win_s|, the rounding error is at most
    (c + p + offsets + T^2 + 4) u64 M^2, and is added. M is computed from sums of squares, with an error below that
    factor, since c times the offsets exceeds their sum.
    """
    groups = geometry.groups
    windows_bTT = window_products(_per_group(x_bk, groups), geometry)
    g_bpT = _per_group(g_bk, groups).flatten(2)
    outputs_bTT = g_bpT.mT @ g_bpT
    lengths, T = g_bpT.shape[1] + geometry.weight[1:].numel() + 1, g_bpT.shape[2]
    error = (lengths + T**2 + 4) * roundoff(torch.float64)
    # A square below the smallest number is lost.
    lost = torch.finfo(torch.float64).tiny * lengths
    left_bT, right_bT = ((m.diagonal(dim1=1, dim2=2) + lost).sqrt() for m in (outputs_bTT, windows_bTT))
    mass_b = torch.linalg.vecdot(left_bT, right_bT) * (1 + error)
    gram_b = torch.linalg.vecdot(windows_bTT.flatten(1), outputs_bTT.flatten(1))
    square_b = gram_b.clamp_min(0) + error * mass_b.square()
    # Squared norms of the groups add up. So do their masses, which bounds the mass of the whole.
    return square_b.view(-1, groups).sum(1), mass_b.view(-1, groups).sum(1)


def _chunks(x_Bk: Tensor, g_Bk: Tensor, geometry: Geometry) -> list[slice]:
    k, channels, *pixels = x_Bk.shape[1:]
    inputs, outputs = k * torch.Size(pixels).numel(), k * g_Bk.shape[3:].numel()
    matrices = geometry.groups * (2 * inputs**2 + 2 * outputs**2)
    bytes_each = 8 * (matrices + channels * inputs + g_Bk.shape[2] * outputs)
    return chunks(len(x_Bk), bytes_each, _CACHED_BYTES if x_Bk.device.type == "cpu" else GRAM_BYTES)


def window_products(x_bck: Tensor, geometry: Geometry) -> Tensor:
    """[b, c, k, *pixels] -> [b, T, T]: <win_t, win_s> of all pairs of positions of an example, for one group."""
    b, _, k, *pixels = x_bck.shape
    # The rows of a fold come first, as an axis without shifts.
    strides = (1, *geometry.stride)
    shifts = [{0: [0]}, *(geometry.shifts(axis) for axis in range(len(pixels)))]
    places = [k, *(geometry.places(axis, size) for axis, size in enumerate(pixels))]
    total: Tensor | None = None
    for phase in product(*shifts):
        x_bcu = x_bck
        for axis, (rest, step) in enumerate(zip(phase, strides, strict=True)):
            x_bcu = _every(x_bcu, 2 + axis, rest, step)
        sizes = x_bcu.shape[2:]
        x_bcu = x_bcu.flatten(2)
        pairs = (x_bcu.mT @ x_bcu).view(b, *sizes, *sizes)
        for axis, rest in enumerate(phase):
            dims = 1 + axis, 1 + len(sizes) + axis
            pairs = _slide(pairs, dims, shifts[axis][rest], places[axis])
        total = pairs if total is None else total.add_(pairs)
    assert total is not None  # a kernel has an offset
    T = torch.Size(places).numel()
    return total.reshape(b, T, T)


def _every(t: Tensor, dim: int, first: int, step: int) -> Tensor:
    """Every `step`-th entry along a dimension; empty if `first` lies beyond its end."""
    return t if step == 1 else t[(slice(None),) * dim + (slice(first, None, step),)]


def _slide(pairs: Tensor, dims: tuple[int, int], moves: Sequence[int], places: int) -> Tensor:
    """sum_q pairs[.., t + q, .., s + q, ..] for t and s below `places`, in both dimensions of one axis."""
    size = pairs.shape[dims[0]]
    if list(moves) == [0] and size == places:
        return pairs
    shape = list(pairs.shape)
    shape[dims[0]] = shape[dims[1]] = places
    slid = pairs.new_zeros(shape)
    for q in moves:
        first, last = max(0, -q), min(places, size - q)  # pixels outside this range are padding
        if first < last:
            _square(slid, dims, first, last).add_(_square(pairs, dims, first + q, last + q))
    return slid


def _square(pairs: Tensor, dims: tuple[int, int], first: int, last: int) -> Tensor:
    for dim in dims:
        pairs = pairs.narrow(dim, first, last - first)
    return pairs


def _per_group(t_bk: Tensor, groups: int) -> Tensor:
    """[b, k, groups * C, ...] -> [b * groups, C, k, ...] in float64."""
    return torch.unflatten(t_bk.double(), 2, (groups, -1)).movedim(1, 3).flatten(0, 1)
