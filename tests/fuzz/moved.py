"""Blocks in which the data choose the rows of a layer and their order."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.fuzz.block import Block, Shape, block

THRESHOLD = 0.123  # not 0, where paddings put whole rows


def scores_of(h: Tensor) -> Tensor:
    """Return a score for each position from its values: [B, T].

    Rounding must not decide between two positions. So the weights differ, since a layer norm makes plain sums 0,
    and each position adds a different constant, since two positions may be equal.
    """
    weights, places = (torch.arange(n, dtype=h.dtype) for n in (h.shape[2], h.shape[1]))
    return (h.detach() * weights.cos()).sum(2) + 0.017 * places


def mask_of(h: Tensor) -> Tensor:
    """Some positions of each example: [B, T]."""
    return scores_of(h) > THRESHOLD


def lengths_of(h: Tensor) -> Tensor:
    """A length of at least 1 for each example: [B]."""
    return mask_of(h).sum(1).clamp_min(1)


@block()
class Selected(Block):
    """A layer on the positions that a mask selects, put back into place."""

    always = ("rows by mask",)

    def build(self, shape: Shape) -> None:
        self.layer = nn.Linear(shape.width, 2)
        self.out = Shape(shape.length, 2)

    def forward(self, h: Tensor) -> Tensor:
        mask = mask_of(h)
        made = torch.zeros(*h.shape[:2], 2, dtype=h.dtype)
        made[mask] = self.layer(h[mask])
        return made


@block()
class SelectedSum(Block):
    """A layer on the selected positions, summed by the example that owns them."""

    always = ("rows by mask, summed",)

    def build(self, shape: Shape) -> None:
        self.layer = nn.Linear(shape.width, 2, bias=False)
        self.out = Shape(1, 2)

    def forward(self, h: Tensor) -> Tensor:
        mask = mask_of(h)
        owner = mask.nonzero()[:, 0]
        return torch.zeros(len(h), 2, dtype=h.dtype).index_add(0, owner, self.layer(h[mask]))[:, None]


@block()
class Sorted(Block):
    """Examples sorted by length, a layer, and back."""

    always = ("sorted by length",)

    def build(self, shape: Shape) -> None:
        self.layer = nn.Linear(shape.width, 3)
        self.out = Shape(shape.length, 3)

    def forward(self, h: Tensor) -> Tensor:
        order = lengths_of(h).argsort(descending=True, stable=True)
        return self.layer(h[order])[order.argsort()]


@block()
class Gathered(Block):
    """The best position of each example: rows move within an example only."""

    always = ("best position",)

    def build(self, shape: Shape) -> None:
        self.layer = nn.Linear(shape.width, 3)
        self.out = Shape(1, 3)

    def forward(self, h: Tensor) -> Tensor:
        best = scores_of(h).topk(1, dim=1).indices[..., None].expand(-1, -1, h.shape[2])
        return self.layer(h.gather(1, best))


@block()
class PackedRows(Block):
    """A layer on the rows of a packed sequence."""

    always = ("packed rows",)

    def build(self, shape: Shape) -> None:
        self.layer = nn.Linear(shape.width, 2)
        self.out = Shape(shape.length, 2)

    def forward(self, h: Tensor) -> Tensor:
        packed = pack_padded_sequence(h, lengths_of(h), batch_first=True, enforce_sorted=False)
        moved = packed._replace(data=self.layer(packed.data))
        return pad_packed_sequence(moved, batch_first=True, total_length=h.shape[1])[0]


@block(1.5)
class PackedRecurrent(Block):
    """A recurrent network on a packed sequence."""

    always = ("packed recurrent",)
    maybe = ("packed recurrent bidirectional",)

    def build(self, shape: Shape) -> None:
        both = self.sometimes("packed recurrent bidirectional", 0.7)
        kind = self.dice.choice([nn.RNN, nn.LSTM, nn.GRU])
        self.layer = kind(shape.width, 2, self.dice.randint(1, 2), batch_first=True, bidirectional=both)
        self.out = Shape(shape.length, 4 if both else 2)

    def forward(self, h: Tensor) -> Tensor:
        packed = pack_padded_sequence(h, lengths_of(h), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=h.shape[1])[0]


@block()
class Experts(Block):
    """Each position goes to one of two layers."""

    always = ("mixture of experts",)

    def build(self, shape: Shape) -> None:
        self.experts = nn.ModuleList(nn.Linear(shape.width, 2) for _ in range(2))
        self.out = Shape(shape.length, 2)

    def forward(self, h: Tensor) -> Tensor:
        mask, made = mask_of(h), torch.zeros(*h.shape[:2], 2, dtype=h.dtype)
        for chosen, expert in zip((mask, ~mask), self.experts, strict=True):
            made = made.index_put((chosen,), expert(h[chosen]))
        return made
