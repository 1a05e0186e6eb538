"""Which rows of a tensor belong to which example.

Never guessed from sizes: a sequence can be as long as the batch is large, and attention runs its output
projection on T*B rows even in a batch-first model. A *probe* decides. The gradient is linear in the
weights r_i of sum_i r_i loss_i, so a row that belongs to example i alone has

    gradient(sum_i r_i loss_i)[row] = r_i * gradient(sum_i loss_i)[row],

exactly, when r_i is a power of two (scaling by one commutes with rounding). One extra backward pass thus
tests every row of every tensor at once: a layout is right if all of its rows agree, and a tensor on
which no layout agrees mixes examples or has no example axis.

Rounding. On a GPU some kernels add in an order that changes (attention's atomic sums), so two passes differ: in float32
by little, which a fixed tolerance covers. But where such sums are rounded to bfloat16, an entry that lies on the edge
goes up in one pass and down in the other, and some layers later no entry is the same: the passes are as far apart as
if every operation had rounded at random, or not apart at all if no entry lay on an edge. How far that is depends on the
network; it is measured. A pass over *three times* the losses rounds every entry anew, so that

    gradient(3 sum_i loss_i) / 3 - gradient(sum_i loss_i)

is as long as the difference of two passes becomes, in every example, whatever the order of sums. Rows may be off by 8
times that, and at weight r_i by r_i times as much: rounding scales with an example's own weight. (On an H200, with 12
to 24 layers and 1024 to 4096 positions, passes are up to 0.7 % apart, so that about 6 % are allowed.) Coupling does not
scale so: a share s of example j's gradient in a row of example i is an error of s r_j, which is 2^12 s r_i for weights
that are far apart. So shares of about 0.06 / 2^12 are seen in bfloat16, and of 1e-3 / 2^12 in float32, of gradients of
one size.

Legend: B examples in the batch; an axis of size outer * B * inner holds example (index // inner) % B.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from clipwise.gradients.forms import as_real
from clipwise.noise.generators import private_generator

LEVELS = 13  # probe weights are 2^0 .. 2^12: scaling up cannot push a gradient into the denormals
LARGEST_WEIGHT = 2.0 ** (LEVELS - 1)
_QUIET = 1e-10  # of the longest row, squared: on CUDA, shorter rows say nothing
_REPEATED = 1e-5  # relative, of a row where kernels add in one order
_REORDERED = 1e-3  # and where the order may change
_MARGIN = 8.0  # how much further apart two passes may be than two others were
_TELLING = 1 / 8  # of a row: with more rounding than this in it, its owner is not read from it
_DENORMAL = 2.0**20  # below this many times the smallest normal number digits may have been lost
_UNSQUARED = 2.0**-480  # of the largest: the square of less loses its digits in float64


@dataclass(frozen=True)
class Layout:
    """Where the examples of a batch lie in a tensor: along `axis`, as (outer, batch, inner)."""

    axis: int
    outer: int
    batch: int
    inner: int

    def split(self, t: Tensor) -> Tensor:
        """[..., outer*B*inner, ...] -> [B, ..., outer, inner, ...] (a view where strides allow)."""
        a = self.axis
        sizes = (*t.shape[:a], self.outer, self.batch, self.inner, *t.shape[a + 1 :])
        return t.reshape(sizes).movedim(a + 1, 0)

    def rows(self, t: Tensor) -> Tensor:
        """[..., n] -> [B, T, n]: every position of an example in one middle dimension."""
        if type(self) is Layout and self.axis == 0 and self.outer == 1 and t.dim() > 1:
            # Nearly always, and nothing has to be moved. (Another kind of layout has its own way to split.)
            return t.reshape(self.batch, self.inner * t.shape[1:-1].numel(), t.shape[-1])
        split = self.split(t)
        return split.reshape(self.batch, split.shape[1:-1].numel(), split.shape[-1])

    def along_axis(self, per_example_B: Tensor) -> Tensor:
        """One number an example, laid out along the axis: [outer*B*inner]."""
        return per_example_B.repeat_interleave(self.inner).repeat(self.outer)

    def owners(self, device: torch.device) -> Tensor:
        """The example that owns each row along the axis, -1 for rows of nobody."""
        return self.along_axis(torch.arange(self.batch, device=device))

    def broadcast(self, along_axis: Tensor, dimensions: int) -> Tensor:
        """One number for each row along the axis, in a shape that broadcasts to tensors of so many dimensions."""
        return along_axis.view([-1 if d == self.axis else 1 for d in range(dimensions)])

    def only(self, t: Tensor, example: int) -> Tensor:
        """The rows of one example; the others are cleared (and not multiplied by 0: 0 * Inf is NaN)."""
        return t.masked_fill(self.broadcast(self.owners(t.device) != example, t.dim()), 0)

    def on_axis(self, axis: int) -> Layout:
        """The same rows, along another axis."""
        return replace(self, axis=axis)

    def resized(self, shape: torch.Size, batch: int) -> Layout | None:
        """The same layout for another batch and another number of rows, if that is without doubt.

        An axis that kept its size though the batch did not may not hold the examples at all.
        """
        if self.axis >= len(shape) or shape[self.axis] % batch:
            return None
        if batch != self.batch and shape[self.axis] == self.size:
            return None
        k = shape[self.axis] // batch
        if self.outer == 1 and self.inner == 1:
            return Layout(self.axis, 1, batch, 1) if k == 1 else None
        if self.outer == 1:
            return Layout(self.axis, 1, batch, k)
        if self.inner == 1:
            return Layout(self.axis, k, batch, 1)
        return Layout(self.axis, self.outer, batch, self.inner) if k == self.outer * self.inner else None

    @property
    def size(self) -> int:
        """The length of the axis."""
        return self.outer * self.batch * self.inner


def hypotheses(shape: torch.Size, batch: int) -> Iterator[Layout]:
    """Every way in which `batch` examples could lie in a tensor of this shape."""
    for axis, size in enumerate(shape):
        if size == 0 or size % batch:
            continue
        k = size // batch
        for outer in range(1, k + 1):
            if k % outer == 0:
                yield Layout(axis, outer, batch, k // outer)


def probe_weights(batch: int, like: Tensor) -> Tensor:
    """Random powers of two, as distinct and as far apart as the batch allows."""
    generator = private_generator()
    levels = torch.linspace(0, LEVELS - 1, min(batch, LEVELS)).round()
    levels = levels[torch.randperm(len(levels), generator=generator)].repeat(-(-batch // LEVELS))[:batch]
    weights_B: Tensor = 2.0 ** levels[torch.randperm(batch, generator=generator)]
    return weights_B.to(device=like.device, dtype=like.dtype)


@dataclass(frozen=True)
class Probe:
    """The gradients of the plain and of the weighted sum of losses with respect to one tensor."""

    plain: Tensor
    weighted: Tensor
    weights_B: Tensor
    thrice: Tensor | None = (
        None  # the gradient of three times the plain sum, where passes may differ by rounding
    )

    def agrees(self, layout: Layout) -> bool:
        """Whether every live, finite row has exactly the weight of the example that owns it here."""
        return self._agrees(layout, self._moments(layout.axis))

    def _agrees(self, layout: Layout, moments: tuple[Tensor, Tensor, Tensor]) -> bool:
        """|r p - w|^2 = r^2 |p|^2 - 2 r <p, w> + |w|^2 a row, for plain p, weighted w and its weight r."""
        pp, pw, ww = moments
        r = layout.along_axis(self.weights_B.double())
        error, size = r.square() * pp - 2 * r * pw + ww, r.square() * pp + ww
        lost: Tensor | float = max(self._lost, _UNSQUARED) ** 2 * (self.plain.numel() / max(1, len(error)))
        if self.repeats:
            return bool((error <= _REPEATED**2 * size + lost).all())
        if size.numel():
            # A row that ought to be 0 is what rounding left of its terms, in an order that changes.
            lost = lost + _QUIET * size.max()
        return bool((error <= _REORDERED**2 * size + lost + r.square() * self._rounding(layout, pp)).all())

    def _rounding(self, layout: Layout, pp: Tensor) -> Tensor | float:
        """How far apart two passes may be in a row of weight 1, squared: several times what `thrice` shows.

        A row can be small beside the terms that it is summed from (attention's queries), and then it is mostly
        rounding. So rows have the allowance of the worst one of their example. Where the owner of each row is read from
        the row itself there is no such help: a row that is mostly rounding tells nothing.
        """
        if self.thrice is None:
            return 0.0
        apart = (self.thrice / 3 - self.plain).nan_to_num(0, 0, 0)
        rows = as_real(apart.movedim(layout.axis, 0).reshape(len(pp), -1))
        square_N = _MARGIN**2 * (rows.double() / self._scale).square().sum(1)
        if type(layout) is not Layout:
            return torch.minimum(square_N, _TELLING**2 * pp)
        along = layout.on_axis(0)
        return along.along_axis(along.split(square_N).flatten(1).amax(1))

    def agrees_by_entry(self, layout: Layout) -> bool:
        """The same of every single entry, where sums are made in one order: a huge one must hide no other."""
        if not self.repeats:
            return True
        p, w = self._speaking
        error = (w - p * layout.broadcast(layout.along_axis(self.weights_B.double()), p.dim())).abs()
        return bool((error <= 1e-5 * w.abs() + self._lost).all())

    @property
    def repeats(self) -> bool:
        """Whether kernels add in one order, pass after pass."""
        return self.plain.device.type == "cpu"

    def _moments(self, axis: int) -> tuple[Tensor, Tensor, Tensor]:
        """|p|^2, <p, w> and |w|^2 of every row along an axis."""
        rest = self.plain.numel() // max(1, self.plain.shape[axis])
        p, w = (as_real(x.movedim(axis, 0).reshape(x.shape[axis], rest)) for x in self._speaking)
        return p.square().sum(1), (p * w).sum(1), w.square().sum(1)

    def ratios(self, axis: int) -> Tensor:
        """How many times longer each row along an axis is in the weighted gradient; 0 for rows without any."""
        pp, _, ww = self._moments(axis)
        return torch.where(pp > 0, ww / pp, 0).sqrt()

    @cached_property
    def _speaking(self) -> tuple[Tensor, Tensor]:
        """Plain and weighted gradient in float64, no entry above 1.

        Single entries that are not finite say nothing, and are 0; the other entries of their row still
        speak, or one bad example would let any axis pass that crosses it.
        """
        silent = ~(torch.isfinite(self.plain) & torch.isfinite(self.weighted))
        wide = torch.complex128 if self.plain.is_complex() else torch.float64
        p, w = (x.to(wide).masked_fill(silent, 0) / self._scale for x in (self.plain, self.weighted))
        return p, w

    @cached_property
    def _scale(self) -> float:
        if self.plain.numel() == 0:
            return 1.0
        largest = max(float(x.nan_to_num(0, 0, 0).abs().max()) for x in (self.plain, self.weighted))
        return largest or 1.0

    @property
    def _lost(self) -> float:
        """An entry below this may have lost its digits, in units of the largest."""
        tiny = torch.finfo(torch.promote_types(self.plain.dtype, torch.float32)).tiny
        return _DENORMAL * tiny / self._scale

    def is_dead(self) -> bool:
        """No gradient at all arrives here, so this batch decides nothing. (A plain sum can cancel.)"""
        return not bool((self.plain != 0).any() or (self.weighted != 0).any())

    def is_silent(self) -> bool:
        """Nothing arrives here but what is not finite, or 0."""
        p, w = self._speaking
        return not bool(p.any() or w.any())

    def layouts(self) -> list[Layout]:
        """The layouts that survive."""
        found: list[Layout] = []
        for axis, same in groupby(hypotheses(self.plain.shape, len(self.weights_B)), key=lambda h: h.axis):
            moments = self._moments(axis)
            found.extend(h for h in same if self._agrees(h, moments))
        return found


def surviving(probes: Sequence[Probe]) -> list[Layout]:
    """The layouts with which all probes of a tensor agree."""
    first, *others = probes
    return [layout for layout in first.layouts() if all(probe.agrees(layout) for probe in others)]
