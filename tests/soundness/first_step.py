"""The first step of runs on neighbouring data sets: the same weights and draw, one unit changed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise import Batch, Private, layers, make_private
from clipwise.noise.key import NoiseKey
from clipwise.sampling.base import Indices
from clipwise.sampling.microbatches import ByUser, Cut

N, D, C = 40, 6, 0.7  # records, half the length of one, clipping norm
BATCH = 20
DRAWS = [
    ("poisson", "zero-out"),
    ("truncated-poisson", "zero-out"),
    ("fixed-size", "replace-one"),
    ("partition", "replace-one"),
    ("shuffled", "zero-out"),
    ("shuffled", "replace-one"),
    ("full", "zero-out"),
    ("full", "replace-one"),
]
# A partition is for blocks that are clipped as a whole, not for single records or users.
ONE_BY_ONE = [draw for draw in DRAWS if draw[0] != "partition"]
OF_BATCH = [(*draw, "record") for draw in DRAWS] + [(*draw, "user") for draw in ONE_BY_ONE]
SCALES = [0.0, 1e-30, 1e-3, 1.0, 1e3, 1e18, 1e30, math.inf, math.nan]


class Two(nn.Module):
    """The gradient of a row's loss is the row itself, half of it in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, 1, bias=False), nn.Linear(D, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.first(x[:, :D]) + self.second(x[:, D:])).squeeze(1)


class Without(Cut):
    """A cut of a draw without some records. A user without records adds nothing."""

    def __init__(self, inner: Cut, records: Indices) -> None:
        self._inner, self._records = inner, records

    def __call__(self, drawn: Indices) -> list[Indices]:
        if isinstance(self._inner, ByUser):
            return [np.setdiff1d(piece, self._records) for piece in self._inner(drawn)]
        return self._inner(np.setdiff1d(drawn, self._records))


@dataclass(frozen=True)
class Setting:
    """A run without its data."""

    strategy: Batch
    sampling: str
    adjacency: str
    users: list[int] | None = None
    batch_size: int = BATCH

    def begin(self, rows: Tensor, model: nn.Module) -> Private:
        """Return a run with the same draws for every data set."""
        size = {} if self.sampling == "full" else {"batch_size": self.batch_size}
        private = make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            TensorDataset(rows),
            clipping=self.strategy,
            group=self.users,
            sampling=self.sampling,
            adjacency=self.adjacency,
            noise_multiplier=0,
            **size,
        )
        private._context.keys.key = NoiseKey.from_seed(3, b"the same draws")
        return private

    def largest_piece(self, model: nn.Module) -> Indices:
        """Return the records of the largest microbatch of the first step."""
        private = self.begin(torch.zeros(N, 2 * D), model)
        return max(private.loader._cut(private._context.scheme.draw(*next(private.loader._secrets()))), key=len)

    def unit_of(self, record: int) -> Indices:
        """Return all records of a record's unit."""
        if self.users is None:
            return np.array([record])
        return np.flatnonzero(np.array(self.users) == self.users[record])


@dataclass(frozen=True)
class Pair:
    """Two data sets that differ in the records of one unit, `victim`."""

    rows: Tensor
    spoiled: Tensor
    victim: Indices


def turned(victim: Indices) -> Pair:
    """All rows point in one direction; the victim, a million times as long, in the opposite one."""
    rows = torch.ones(N, 2 * D).double()
    spoiled = rows.clone()
    spoiled[victim] = -1e6
    return Pair(rows, spoiled, victim)


def any_neighbours(
    draw: tuple[str, str], k: Any, record: int, scale: float, seed: int, **options: Any
) -> tuple[Setting, Pair]:
    """Random rows, with one unit (a record among k microbatches, or a user) on another scale.

    `options` are those of `Batch`.
    """
    random = torch.Generator().manual_seed(seed)
    owners = torch.randint(0, 8, (N,), generator=random).tolist() if k == "user" else None
    strategy = Batch(C, 1 if k == "user" else k, **options)
    setting = Setting(strategy, *draw, owners, batch_size=4 if k == "user" else BATCH)
    victim = setting.unit_of(record)
    rows = torch.randn(N, 2 * D, generator=random)
    spoiled = rows.clone()
    spoiled[victim] = torch.randn(len(victim), 2 * D, generator=random) * scale
    return setting, Pair(rows, spoiled, victim)


def coupled(seed: int) -> nn.Module:
    """Batch norm mixes the examples, and so does the loss."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layer = nn.Sequential(nn.Linear(2 * D, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    return nn.Sequential(layers.without_running_statistics(layer), nn.Flatten(0))
