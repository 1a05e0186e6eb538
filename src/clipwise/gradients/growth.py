"""Whether a tensor follows the size of the batch, though the graph shows no example in it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import log

import torch
from torch import Tensor

_GROWN_BATCHES = 2
_CERTAIN = 9 * log(10)  # nats; see Growth


@dataclass
class Growth:
    """Whether a tensor grows with the batch. A tensor computed from parameters alone does not.

    With dynamic padding it may have the padded length, which can be a multiple of a small batch size by chance. So
    there are two criteria. Rows that data select from a table are no positions, and two changes of the batch size are
    enough. For any other tensor, chance has to be excluded: a size that does not depend on the batch size takes the
    sequence that was seen with a probability of at most exp(-entropy of the batch sizes), because different batch sizes
    have different multiples. The longest record of a batch depends on the batch size a little, hence the wide margin.

    `axes` holds the axes with a size that has been a constant multiple of the batch size so far.
    """

    axes: dict[int, float] | None = None
    batch: int = 0
    grown: int = 0
    batches: Counter[int] = field(default_factory=Counter)
    selection: Tensor | None = None
    is_selected_by_data: bool = False

    def observe(self, shape: torch.Size, batch: int, selection: Tensor | None = None) -> bool:
        """Record one batch. True once the tensor has followed the batch size beyond chance.

        Args:
            shape: of the tensor.
            batch: the batch size.
            selection: the indices of its rows, if it consists of selected rows of a table.
        """
        ratios = {axis: size / batch for axis, size in enumerate(shape) if size and size % batch == 0}
        is_new, self.batch = batch != self.batch, batch
        if self.axes is None:
            self.axes = ratios
        else:
            self.axes = {axis: r for axis, r in self.axes.items() if ratios.get(axis) == r}
            self.grown += is_new
        self.batches[batch] += 1
        if not self.axes:
            self.selection = None
            return False
        if selection is None:
            return self._entropy() > _CERTAIN
        if is_new:  # comparing waits for the device
            self._compare(selection)
        return self.is_selected_by_data and self.has_followed

    @property
    def has_followed(self) -> bool:
        """Whether the tensor has followed the batch size twice, possibly by chance."""
        return bool(self.axes) and self.grown >= _GROWN_BATCHES

    def _entropy(self) -> float:
        """Of the sequence of batch sizes, in nats."""
        count = self.batches.total()
        return sum(n * log(count / n) for n in self.batches.values())

    def _compare(self, selection: Tensor) -> None:
        """Indices that do not depend on the data are equal at equal places, for any length."""
        if self.selection is not None and self.selection.dim() == selection.dim():
            both = tuple(slice(min(sizes)) for sizes in zip(self.selection.shape, selection.shape, strict=True))
            self.is_selected_by_data |= not torch.equal(self.selection[both], selection[both])
        self.selection = selection
