"""What every block of a random model has: a shape in, a shape out, and traits.

A block takes a state [B, length, width] and gives another one. Its *traits* say what is special about it
(a stride, a bias that is missing), so that a run can tell what it has really tried.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

from torch import Tensor, nn


class Shape(NamedTuple):
    """Of a state, without its examples."""

    length: int
    width: int


class Block(nn.Module, ABC):
    """One small piece of a model; the dice decide its options."""

    always: ClassVar[tuple[str, ...]] = ()  # the traits of every block of this kind
    maybe: ClassVar[tuple[str, ...]] = ()  # traits that the dice decide on
    refusable: ClassVar[str] = ""  # why clipwise may refuse a model with this block; empty: it may not

    def __init__(self, dice: random.Random, shape: Shape) -> None:
        super().__init__()
        self.dice, self.out = dice, shape
        self.traits = set(self.always)
        self.build(shape)

    @abstractmethod
    def build(self, shape: Shape) -> None:
        """Make the layers, and set `out` where the state changes its shape."""

    @abstractmethod
    def forward(self, h: Tensor) -> Tensor:
        """A state [B, length, width] to another one."""

    def sometimes(self, trait: str, chance: float = 0.5) -> bool:
        """Throw the dice for a trait, and take note of it."""
        if trait not in self.maybe:
            raise ValueError(f"{type(self).__name__} does not declare the trait {trait!r}")
        happened = self.dice.random() < chance
        if happened:
            self.traits.add(trait)
        return happened

    def divisor(self, n: int) -> int:
        """Any divisor of n."""
        return self.dice.choice([k for k in range(1, n + 1) if n % k == 0])


KINDS: list[type[Block]] = []
WEIGHTS: list[float] = []


def block(weight: float = 1.0) -> Callable[[type[Block]], type[Block]]:
    """Enter a kind of block that models may be made of, and how often."""

    def enter(kind: type[Block]) -> type[Block]:
        KINDS.append(kind)
        WEIGHTS.append(weight)
        return kind

    return enter


def any_block(dice: random.Random, shape: Shape) -> Block:
    """A block of any kind for this shape."""
    kind = dice.choices(KINDS, WEIGHTS)[0]
    return kind(dice, shape)
