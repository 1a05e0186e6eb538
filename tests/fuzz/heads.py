"""The heads of random models: they draw inputs and map them to a state [B, length, width]."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

from tests.fuzz.block import Block, Shape

VOCABULARY = 4  # few words, so that every example repeats some


class Head(Block):
    """A block that takes the inputs themselves."""

    def draw(self, batch: int, generator: torch.Generator) -> Tensor:
        """Return the inputs of a batch, by default ids."""
        return torch.randint(0, VOCABULARY, (batch, self.drawn), generator=generator)

    def build(self, shape: Shape) -> None:
        self.drawn = shape.length


class Vectors(Head):
    always = ("input of vectors",)

    def draw(self, batch: int, generator: torch.Generator) -> Tensor:
        return torch.randn(batch, *self.out, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Embedded(Head):
    always = ("embedding",)
    maybe = ("embedding padding_idx",)

    def build(self, shape: Shape) -> None:
        super().build(shape)
        padding = 1 if self.sometimes("embedding padding_idx") else None
        self.table = nn.Embedding(VOCABULARY, shape.width, padding)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x)


class IndexedTable(Head):
    """A bare table that is indexed without an embedding."""

    always = ("indexed table",)

    def build(self, shape: Shape) -> None:
        super().build(shape)
        self.table = nn.Parameter(torch.randn(VOCABULARY, shape.width))

    def forward(self, x: Tensor) -> Tensor:
        return self.table[x]


class Bags(Head):
    """EmbeddingBag with one bag per example, several bags per example, or bags of any size by offsets."""

    always = ("embedding bag",)
    maybe = (
        "embedding bag sum", "embedding bag mean", "embedding bag max", "embedding bag weights",
        "embedding bag padding_idx", "embedding bag folded", "embedding bag offsets",
    )  # fmt: skip

    def build(self, shape: Shape) -> None:
        mode = self.dice.choice(["sum", "mean", "max"])
        self.traits.add(f"embedding bag {mode}")
        self.weighted = mode == "sum" and self.sometimes("embedding bag weights", 0.8)
        padding = 1 if self.sometimes("embedding bag padding_idx", 0.4) else None
        self.how = self.dice.choice(["plain", "folded", "offsets"])
        if self.how != "plain":
            self.traits.add(f"embedding bag {self.how}")
        self.drawn = 3 * shape.length
        self.table = nn.EmbeddingBag(VOCABULARY, shape.width, mode=mode, padding_idx=padding)
        self.out = Shape(shape.length if self.how == "folded" else 1, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "offsets":  # word 0 is left out, so that bags differ in size and may be empty
            kept = x > 0
            offsets = kept.sum(1).cumsum(0) - kept.sum(1)
            return self.table(x[kept], offsets, self.weights(x[kept]))[:, None]
        rows = x.reshape(-1, 3) if self.how == "folded" else x
        return self.table(rows, None, self.weights(rows)).unflatten(0, (len(x), -1))

    def weights(self, ids: Tensor) -> Tensor | None:
        """Return one weight per word."""
        return (ids + 0.5).to(self.table.weight.dtype).sin() if self.weighted else None


HEADS: dict[type[Head], float] = {Vectors: 0.4, Embedded: 0.2, IndexedTable: 0.1, Bags: 0.3}


def any_head(dice: random.Random, shape: Shape) -> Head:
    """Return a random head."""
    kind = dice.choices(list(HEADS), list(HEADS.values()))[0]
    return kind(dice, shape)
