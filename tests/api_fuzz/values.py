"""Random arguments, most of them valid."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

AWKWARD: tuple[Any, ...] = (
    None,
    0,
    -1,
    1,
    2.5,
    -0.0,
    1e-300,
    1e300,
    10**30,
    math.nan,
    math.inf,
    -math.inf,
    True,
    False,
    "",
    "all",
    "poisson",
    "no such word",
    b"bytes",
    (),
    [],
    [1, "a"],
    {},
    {"a": 1},
    object(),
    len,
    np.float64(0.5),
    np.int64(3),
    np.array([1.0, 2.0]),
    torch.tensor(2.0),
    torch.ones(3),
    1j,
)


@dataclass
class Choice:
    """Draws arguments, and records the invalid ones."""

    dice: random.Random
    odds: float  # of an invalid argument
    spoiled: dict[str, Any] = field(default_factory=dict)
    given: set[str] = field(default_factory=lambda: {"model", "dataset", "optimizer", "every=", "count_noise"})

    def of(self, name: str, *good: Any) -> Any:
        """Return a valid value, or sometimes an invalid one."""
        self.given.add(name)
        if self.dice.random() < self.odds:
            value = self.dice.choice(AWKWARD)
            self.spoiled[name] = value
            return value
        return self.dice.choice(good)

    def among(self, options: dict[str, tuple[Any, ...]], least: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return some of the named arguments: those of `least`, and others at random."""
        names = [name for name in options if name in least or self.dice.random() < 0.4]
        return {name: self.of(name, *options[name]) for name in names}

    def is_likely(self, odds: float) -> bool:
        return self.dice.random() < odds
