"""The base class of the blocks of random models.

A block maps a state [B, length, width] to another one. Its *traits* name its options
(a stride, a missing bias), so that a run can report its coverage.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

from torch import Tensor, nn


class Shape(NamedTuple):
    """The shape of a state, without its examples."""

    length: int
    width: int


class Block(nn.Module, ABC):
    """One small piece of a model, with random options."""

    always: ClassVar[tuple[str, ...]] = ()  # the traits of every block of this kind
    maybe: ClassVar[tuple[str, ...]] = ()  # random traits
    refusable: ClassVar[str] = ""  # why clipwise may refuse this block; "" if it may not

    def __init__(self, dice: random.Random, shape: Shape) -> None:
        super().__init__()
        self.dice, self.out = dice, shape
        self.traits = set(self.always)
        self.build(shape)

    @abstractmethod
    def build(self, shape: Shape) -> None:
        """Build the layers, and set `out` if the shape of the state changes."""

    @abstractmethod
    def forward(self, h: Tensor) -> Tensor:
        """Map a state [B, length, width] to another one."""

    def sometimes(self, trait: str, chance: float = 0.5) -> bool:
        """Draw a trait at random, and record it."""
        if trait not in self.maybe:
            raise ValueError(f"{type(self).__name__} does not declare the trait {trait!r}")
        happened = self.dice.random() < chance
        if happened:
            self.traits.add(trait)
        return happened

    def divisor(self, n: int) -> int:
        """Return a random divisor of n."""
        return self.dice.choice([k for k in range(1, n + 1) if n % k == 0])


KINDS: list[type[Block]] = []
WEIGHTS: list[float] = []


def block(weight: float = 1.0) -> Callable[[type[Block]], type[Block]]:
    """Register a kind of block with its frequency."""

    def enter(kind: type[Block]) -> type[Block]:
        KINDS.append(kind)
        WEIGHTS.append(weight)
        return kind

    return enter


def any_block(dice: random.Random, shape: Shape) -> Block:
    """Return a random block for this shape."""
    kind = dice.choices(KINDS, WEIGHTS)[0]
    return kind(dice, shape)
