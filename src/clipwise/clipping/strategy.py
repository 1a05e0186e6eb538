"""What every way of clipping gives to the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clipwise.privacy import Adjacency, Sampling, Unit

Parameters = Mapping[str, torch.nn.Parameter]


@dataclass(frozen=True)
class Bound:
    """One part of the sum and the most that one unit can move it, in L2."""

    name: str
    parameters: tuple[str, ...]
    sensitivity: float


class Clipper(ABC):
    """A strategy bound to one model: turns losses into a bounded sum. It never draws noise."""

    bounds: tuple[Bound, ...]

    @abstractmethod
    def clipped_sum(self, losses: Tensor) -> dict[str, Tensor]:
        """The bounded sum over the examples of a batch, or of a piece of one, by parameter."""


class Strategy(ABC):
    """A way to bound what one unit can do to the released sum. Only configuration: no model, no data."""

    unit: Unit = Unit.RECORD
    split: str

    @abstractmethod
    def attach(self, parameters: Parameters, adjacency: Adjacency, unit: Unit, sampling: Sampling) -> Clipper:
        """Bind to a model's trainable parameters, or refuse the combination."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The configuration in plain types, for fingerprints and statements."""
