"""Layouts with rows in a data-dependent order or number: packed sequences, sorting, masks, experts.

Probes (layout.py) show the owner of each row. Every example gets a number, written in base 13, and probe k weights
example i by 2^(digit k of its number). A row of example i alone is scaled by exactly these powers of two, so as many
probes as there are digits identify the owner. A row of several examples is not scaled by powers of two except by
chance; one more probe with random weights must agree as well. A row that no gradient reaches has no owner and adds
nothing to any example.

Such a layout is valid for one batch only.

Legend: N rows along an axis, B examples, T the largest number of rows of an example.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clipwise.gradients.layout import LEVELS, Layout, Probe
from clipwise.sampling.generators import private_generator


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
