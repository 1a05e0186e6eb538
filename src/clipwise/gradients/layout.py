"""Which rows of a tensor belong to which example.

The layout is never guessed from sizes: a sequence can be as long as the batch is large, and attention runs its output
projection on T*B rows even in a batch-first model. A *probe* decides. The gradient is linear in the weights r_i of
sum_i r_i loss_i, so a row that belongs to example i alone has

    gradient(sum_i r_i loss_i)[row] = r_i * gradient(sum_i loss_i)[row],

exactly, if r_i is a power of two (scaling by one commutes with rounding). One extra backward pass tests every row of
every tensor: a layout is right if all of its rows agree. A tensor on which no layout agrees mixes examples or has no
example axis.

Rounding. Some GPU kernels add in a nondeterministic order (attention's atomic sums), so two passes differ. In float32
the difference is small, and a fixed tolerance covers it. In bfloat16 such sums may round up in one pass and down in the
other, and some layers later every entry differs, as if every operation had rounded at random; or no entry differs. The
size of the difference depends on the network, so it is measured. A pass over *three times* the losses rounds every
entry anew:

    gradient(3 sum_i loss_i) / 3 - gradient(sum_i loss_i)

is as large as the difference of two passes, in every example and for any order of sums. Rows may differ by 8 times
that, and by r_i times as much at weight r_i, since rounding scales with an example's own weight. (On an H200, with 12
to 24 layers and 1024 to 4096 positions, passes differ by up to 0.7 %, so that about 6 % are allowed.) Coupling scales
differently: a share s of example j's gradient in a row of example i is an error of s r_j, which is 2^12 s r_i for
weights that are far apart. For gradients of equal size, shares of about 0.06 / 2^12 are detected in bfloat16, and of
1e-3 / 2^12 in float32.

Legend: B examples in the batch; an axis of size outer * B * inner holds example (index // inner) % B.

Rows in a data-dependent order or number (packed sequences, sorting, masks, experts) have a `Ragged` layout. Every
example gets a number, written in base 13, and probe k weights example i by 2^(digit k of its number). A row of example
i alone is scaled by exactly these powers of two, so as many probes as there are digits identify the owner. A row of
several examples is not scaled by powers of two except by chance; one more probe with random weights must agree as well.
A row that no gradient reaches has no owner and adds nothing to any example. Such a layout is valid for one batch only.

N: rows along an axis, T: the largest number of rows of an example.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from clipwise.gradients.forms import as_real
from clipwise.sampling.generators import private_generator

LEVELS = 13  # probe weights are 2^0 .. 2^12: scaling up cannot make a gradient denormal
LARGEST_WEIGHT = 2.0 ** (LEVELS - 1)
_QUIET = 1e-10  # relative to the longest row, squared: on CUDA, shorter rows are ignored
_REPEATED = 1e-5  # relative error of a row, with a deterministic order of sums
_REORDERED = 1e-3  # with a nondeterministic order
_MARGIN = 8.0  # allowed difference of two passes, relative to the measured one
_TELLING = 1 / 8  # of a row: with more rounding than this, its owner cannot be identified
_DENORMAL = 2.0**20  # digits may be lost below this multiple of the smallest normal number
_UNSQUARED = 2.0**-480  # relative to the largest: the squares of smaller numbers lose digits in float64


@dataclass(frozen=True)
class Layout:
    """How the examples of a batch lie in a tensor: along `axis`, as (outer, batch, inner)."""

    axis: int
    outer: int
    batch: int
    inner: int
    is_simple: bool = field(init=False, compare=False, repr=False)  # whether row i belongs to example i

    def __post_init__(self) -> None:
        is_simple = type(self) is Layout and (self.axis, self.outer, self.inner) == (0, 1, 1)
        object.__setattr__(self, "is_simple", is_simple)

    def split(self, t: Tensor) -> Tensor:
        """[..., outer*B*inner, ...] -> [B, ..., outer, inner, ...] (a view where strides allow)."""
        a = self.axis
        sizes = (*t.shape[:a], self.outer, self.batch, self.inner, *t.shape[a + 1 :])
        return t.reshape(sizes).movedim(a + 1, 0)

    def rows(self, t: Tensor) -> Tensor:
        """[..., n] -> [B, T, n]: all positions of an example in one middle dimension."""
        if type(self) is Layout and self.axis == 0 and self.outer == 1 and t.dim() > 1:
            # The usual case, without a copy. (Subclasses have their own `split`.)
            return t.reshape(self.batch, self.inner * t.shape[1:-1].numel(), t.shape[-1])
        split = self.split(t)
        return split.reshape(self.batch, split.shape[1:-1].numel(), split.shape[-1])

    def along_axis(self, per_example_B: Tensor) -> Tensor:
        """One number per example, laid out along the axis: [outer*B*inner]."""
        return per_example_B.repeat_interleave(self.inner).repeat(self.outer)

    def owners(self, device: torch.device) -> Tensor:
        """The example that owns each row along the axis, -1 for rows without an owner."""
        return self.along_axis(torch.arange(self.batch, device=device))

    def broadcast(self, along_axis: Tensor, dimensions: int) -> Tensor:
        """One number per row along the axis, in a shape that broadcasts to tensors with so many dimensions."""
        return along_axis.view([-1 if d == self.axis else 1 for d in range(dimensions)])

    def only(self, t: Tensor, example: int) -> Tensor:
        """The rows of one example, and zeros elsewhere (not multiplied by 0: 0 * Inf is NaN)."""
        return t.masked_fill(self.broadcast(self.owners(t.device) != example, t.dim()), 0)

    def on_axis(self, axis: int) -> Layout:
        """The same rows, along another axis."""
        return replace(self, axis=axis)

    @property
    def size(self) -> int:
        """The length of the axis."""
        return self.outer * self.batch * self.inner


def resized(places: Sequence[Sequence[Layout]], shapes: Sequence[torch.Size], batch: int) -> list[list[Layout]] | None:
    """The same layouts for another batch and other numbers of rows, or None if one is missing or in doubt."""
    found: list[list[Layout]] = []
    for each, shape in zip(places, shapes, strict=True):
        found.append([now for layout in each if (now := _resized(layout, shape, batch)) is not None])
        if len(found[-1]) < max(1, len(each)):
            return None
    return found


def _resized(layout: Layout, shape: torch.Size, batch: int) -> Layout | None:
    """If the axis kept its size though the batch size changed, it may not hold the examples."""
    axis, outer, inner = layout.axis, layout.outer, layout.inner
    if axis >= len(shape) or shape[axis] % batch or (batch != layout.batch and shape[axis] == layout.size):
        return None
    k = shape[axis] // batch
    if outer == 1:
        return Layout(axis, 1, batch, k) if inner > 1 or k == 1 else None
    if inner == 1:
        return Layout(axis, k, batch, 1)
    return Layout(axis, outer, batch, inner) if k == outer * inner else None


def hypotheses(shape: torch.Size, batch: int) -> Iterator[Layout]:
    """All layouts of `batch` examples that are possible in a tensor of this shape."""
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
    thrice: Tensor | None = None  # the gradient of three times the plain sum, if passes may differ by rounding

    def agrees(self, layout: Layout) -> bool:
        """Whether every live, finite row has exactly the weight of its owner in this layout."""
        return self._agrees(layout, self._moments(layout.axis))

    def _agrees(self, layout: Layout, moments: tuple[Tensor, Tensor, Tensor]) -> bool:
        """|r p - w|^2 = r^2 |p|^2 - 2 r <p, w> + |w|^2 per row, for plain p, weighted w and its weight r."""
        pp, pw, ww = moments
        r = layout.along_axis(self.weights_B.double())
        error, size = r.square() * pp - 2 * r * pw + ww, r.square() * pp + ww
        lost: Tensor | float = max(self._lost, _UNSQUARED) ** 2 * (self.plain.numel() / max(1, len(error)))
        if self.repeats:
            return bool((error <= _REPEATED**2 * size + lost).all())
        if size.numel():
            # A row that should be 0 holds the rounding errors of its terms, in a nondeterministic order.
            lost = lost + _QUIET * size.max()
        return bool((error <= _REORDERED**2 * size + lost + r.square() * self._rounding(layout, pp)).all())

    def _rounding(self, layout: Layout, pp: Tensor) -> Tensor | float:
        """The squared difference allowed between two passes in a row of weight 1: several times what `thrice` shows.

        A row that is small relative to its terms (attention's queries) is mostly rounding error. So all rows of an
        example get the allowance of its worst row. If the owner of each row is identified from that row alone, this is
        impossible: a row that is mostly rounding error is ignored.
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
        """Compares every single entry, if sums are deterministic, so that a huge entry hides no other."""
        if not self.repeats:
            return True
        p, w = self._speaking
        error = (w - p * layout.broadcast(layout.along_axis(self.weights_B.double()), p.dim())).abs()
        return bool((error <= 1e-5 * w.abs() + self._lost).all())

    @property
    def repeats(self) -> bool:
        """Whether kernels add in the same order in every pass."""
        return self.plain.device.type == "cpu"

    def _moments(self, axis: int) -> tuple[Tensor, Tensor, Tensor]:
        """|p|^2, <p, w> and |w|^2 of every row along an axis."""
        rest = self.plain.numel() // max(1, self.plain.shape[axis])
        p, w = (as_real(x.movedim(axis, 0).reshape(x.shape[axis], rest)) for x in self._speaking)
        product = p * w  # its memory is used again: fresh memory takes longer than the arithmetic
        pw = product.sum(1)
        return torch.mul(p, p, out=product).sum(1), pw, torch.mul(w, w, out=product).sum(1)

    def ratios(self, axis: int) -> Tensor:
        """The factor between weighted and plain gradient of each row along an axis; 0 for rows without a gradient."""
        pp, _, ww = self._moments(axis)
        return torch.where(pp > 0, ww / pp, 0).sqrt()

    @cached_property
    def _speaking(self) -> tuple[Tensor, Tensor]:
        """Plain and weighted gradient in float64, scaled so that no entry exceeds 1.

        Entries that are not finite become 0. The other entries of their row still count; otherwise one bad example
        would make every axis that crosses it pass.
        """
        wide = torch.complex128 if self.plain.is_complex() else torch.float64
        p, w = (x.to(wide, copy=True) for x in (self.plain, self.weighted))
        if not math.isfinite(_largest(self.plain) + _largest(self.weighted)):
            silent = ~(torch.isfinite(self.plain) & torch.isfinite(self.weighted))
            p.masked_fill_(silent, 0)
            w.masked_fill_(silent, 0)
        return p.div_(self._scale), w.div_(self._scale)

    @cached_property
    def _scale(self) -> float:
        largest = _largest(self.plain), _largest(self.weighted)
        if not math.isfinite(sum(largest)):
            largest = _largest(self.plain.nan_to_num(0, 0, 0)), _largest(self.weighted.nan_to_num(0, 0, 0))
        return max(largest) or 1.0

    @property
    def _lost(self) -> float:
        """Entries below this, relative to the largest, may have lost digits."""
        tiny = torch.finfo(torch.promote_types(self.plain.dtype, torch.float32)).tiny
        return _DENORMAL * tiny / self._scale

    def is_dead(self) -> bool:
        """Whether no gradient arrives here, so that this batch decides nothing. (A plain sum can cancel.)"""
        return not bool((self.plain != 0).any() or (self.weighted != 0).any())

    def is_silent(self) -> bool:
        """Whether every entry that arrives is 0 or not finite."""
        p, w = self._speaking
        return not bool(p.any() or w.any())

    def layouts(self) -> list[Layout]:
        """The layouts that agree with this probe."""
        found: list[Layout] = []
        for axis, same in groupby(hypotheses(self.plain.shape, len(self.weights_B)), key=lambda h: h.axis):
            moments = self._moments(axis)
            found.extend(h for h in same if self._agrees(h, moments))
        return found


def _largest(x: Tensor) -> float:
    """The largest absolute value, NaN if there is one; 0 for an empty tensor."""
    if x.numel() == 0:
        return 0.0
    if x.is_complex():
        return float(x.abs().max())
    least, most = torch.aminmax(x)
    return float(torch.maximum(-least, most))


def surviving(probes: Sequence[Probe]) -> list[Layout]:
    """The layouts that agree with all probes of a tensor."""
    first, *others = probes
    return [layout for layout in first.layouts() if all(probe.agrees(layout) for probe in others)]


@dataclass(frozen=True, eq=False)
class Ragged(Layout):
    """Any number of rows per example along `axis`, in any order. Rules see T rows per example."""

    owner_N: Tensor  # the example of each row, -1 for rows without an owner
    index_BT: Tensor  # the rows of each example, -1 for padding

    @classmethod
    def of(cls, axis: int, owner_N: Tensor, batch: int) -> Ragged:
        """Build the layout from the owner of every row."""
        counts_B = torch.bincount(owner_N[owner_N >= 0], minlength=batch)
        most = max(1, int(counts_B.max()))
        rows = torch.argsort(owner_N, stable=True)[int((owner_N < 0).sum()) :]
        owners = owner_N[rows]
        place = torch.arange(len(rows), device=rows.device) - (counts_B.cumsum(0) - counts_B)[owners]
        index_BT = torch.full((batch, most), -1, device=rows.device)
        index_BT[owners, place] = rows
        return cls(axis, most, batch, 1, owner_N, index_BT)

    @classmethod
    def without_owners(cls, shape: torch.Size, batch: int, device: torch.device) -> Ragged | None:
        """A layout in which no row has an owner: no gradient arrives, or there are no rows."""
        if not shape:
            return None
        axis = next((axis for axis, size in enumerate(shape) if size == 0), 0)
        return cls.of(axis, torch.full((shape[axis],), -1, device=device), batch)

    def split(self, t: Tensor) -> Tensor:
        """[..., N, ...] -> [B, ..., T, 1, ...], with zeros where an example has fewer rows."""
        rows_N = t.movedim(self.axis, 0)
        if len(rows_N) == 0:
            rows_N = rows_N.new_zeros((1, *rows_N.shape[1:]))
        padded_BT = rows_N[self.index_BT.clamp_min(0)]
        missing = (self.index_BT < 0).view(*self.index_BT.shape, *[1] * (t.dim() - 1))
        return padded_BT.masked_fill(missing, 0).movedim(1, self.axis + 1).unsqueeze(self.axis + 2)

    def along_axis(self, per_example_B: Tensor) -> Tensor:
        """One number per example, laid out along the axis; 0 for rows without an owner."""
        return per_example_B[self.owner_N.clamp_min(0)].masked_fill(self.owner_N < 0, 0)

    def owners(self, device: torch.device) -> Tensor:
        return self.owner_N.to(device)

    def resized(self, shape: torch.Size, batch: int) -> Layout | None:
        """Always None: the next batch has its own rows."""
        return None

    @property
    def size(self) -> int:
        """The length of the axis."""
        return len(self.owner_N)


class Numbers:
    """A random number for every example, and the probe weights that encode it."""

    def __init__(self, batch: int, like: Tensor, unit: float = 1.0) -> None:
        number_B = torch.randperm(batch, generator=private_generator()).to(like.device)
        self._example_of = torch.argsort(number_B)
        self._unit = unit
        self._digits = 1
        while LEVELS**self._digits < batch:
            self._digits += 1
        self.weights = [(unit * 2.0 ** (number_B // LEVELS**k % LEVELS)).to(like.dtype) for k in range(self._digits)]

    def read(self, probes: list[Probe]) -> Ragged | None:
        """The layout that the probes show, along an axis on which every live row has one owner.

        If there are several such axes (all rows may belong to one example), the axis with most owners is used: one huge
        example in rows of all examples hides the others on that axis.
        """
        spelled = [next(p for p in probes if p.weights_B is weights_B) for weights_B in self.weights]
        found = []
        for axis in range(spelled[0].plain.dim()):
            owner_N = self._owners(axis, spelled)
            if owner_N is not None:
                layout = Ragged.of(axis, owner_N, len(self._example_of))
                if all(probe.agrees(layout) and probe.agrees_by_entry(layout) for probe in probes):
                    found.append(layout)
        return max(found, key=lambda layout: int((layout.index_BT[:, 0] >= 0).sum()), default=None)

    def _owners(self, axis: int, spelled: list[Probe]) -> Tensor | None:
        number_N = torch.zeros(spelled[0].plain.shape[axis], dtype=torch.long, device=self._example_of.device)
        for k, probe in enumerate(spelled):
            ratio_N = probe.ratios(axis)
            live_N = ratio_N > 0
            digit_N = torch.where(live_N, ratio_N / self._unit, 1).log2().round().long()
            if bool(((digit_N < 0) | (digit_N >= LEVELS)).any()):
                return None
            number_N = torch.where(live_N & (number_N >= 0), number_N + digit_N * LEVELS**k, -1)
        if bool((number_N >= len(self._example_of)).any()):
            return None
        return torch.where(number_N < 0, -1, self._example_of[number_N.clamp_min(0)])
