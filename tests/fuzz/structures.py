"""Structures of blocks: residuals, branches, reuse, folds. Each is a block around other blocks."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fuzz.blocks import Block, Shape, any_block

LONGEST, WIDEST = 5, 6  # limits of a state


class Plain(Block):
    def build(self, shape: Shape) -> None:
        self.inner = any_block(self.dice, shape)
        self.out = self.inner.out

    def forward(self, h: Tensor) -> Tensor:
        return self.inner(h)


class Residual(Plain):
    always = ("residual",)

    def forward(self, h: Tensor) -> Tensor:
        made = self.inner(h)
        return made + (h if made.shape == h.shape else h.mean((1, 2), keepdim=True))


class CalledTwice(Plain):
    """One module with several calls, in sequence or in parallel."""

    always = ("module called twice",)

    def forward(self, h: Tensor) -> Tensor:
        made = self.inner(h)
        if made.shape == h.shape:
            return self.inner(made.tanh()) + made
        return made + self.inner(h.cos()).tanh()


class Concatenation(Block):
    always = ("concatenation",)

    def build(self, shape: Shape) -> None:
        self.a, self.b = any_block(self.dice, shape), any_block(self.dice, shape)
        self.length = min(self.a.out.length, self.b.out.length)
        self.out = Shape(self.length, self.a.out.width + self.b.out.width)

    def forward(self, h: Tensor) -> Tensor:
        return torch.cat([self.a(h)[:, : self.length], self.b(h)[:, : self.length]], 2)


class Branches(Block):
    """Two branches, one of which gates the other."""

    always = ("branches",)

    def build(self, shape: Shape) -> None:
        self.a, self.b = any_block(self.dice, shape), any_block(self.dice, shape)
        self.out = self.a.out

    def forward(self, h: Tensor) -> Tensor:
        return self.a(h) * self.b(h).mean((1, 2), keepdim=True).sigmoid()


class Folded(Plain):
    """A batch of B*k rows, with the rows of one example adjacent or strided."""

    maybe = ("folded batch", "folded batch, example last")

    def build(self, shape: Shape) -> None:
        super().build(shape)
        self.axis = int(self.sometimes("folded batch"))
        if self.axis == 0:
            self.traits.add("folded batch, example last")
        self.out = Shape(2 * self.inner.out.length, self.inner.out.width)

    def forward(self, h: Tensor) -> Tensor:
        folded = torch.stack([h, h.sin()], self.axis)
        made = self.inner(folded.flatten(0, 1)).unflatten(0, folded.shape[:2])
        return made.movedim(self.axis, 1).flatten(1, 2)


class Shrunk(Block):
    """Keeps models small; has no parameters."""

    def build(self, shape: Shape) -> None:
        self.out = Shape(min(shape.length, LONGEST), min(shape.width, WIDEST))

    def forward(self, h: Tensor) -> Tensor:
        return F.adaptive_avg_pool1d(h, self.out.width)[:, -self.out.length :]


STRUCTURES: dict[type[Block], float] = {
    Plain: 3,
    Residual: 1,
    CalledTwice: 1.5,
    Concatenation: 1,
    Branches: 1,
    Folded: 1.5,
}


def any_structure(dice: random.Random, shape: Shape) -> list[Block]:
    """Return one structure around random blocks, with a limit on its state."""
    kind = dice.choices(list(STRUCTURES), list(STRUCTURES.values()))[0]
    made = kind(dice, shape)
    if made.out.length <= LONGEST and made.out.width <= WIDEST:
        return [made]
    return [made, Shrunk(dice, made.out)]
