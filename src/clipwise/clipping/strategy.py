"""What every way of clipping gives to the engine."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clipwise.errors import ConfigurationError
from clipwise.gradients.precision import IEEE, Arithmetic
from clipwise.gradients.rare import PutAside
from clipwise.privacy import Adjacency, Part, Sampling, Unit, split_noise

Parameters = Mapping[str, torch.nn.Parameter]


@dataclass(frozen=True)
class Bound:
    """One part of the sum and the most that one unit can move it, in L2.

    A part without parameters is a number beside the gradient, such as a count.
    A part with `count_noise` gets noise of that standard deviation times the expected batch size; the others
    share what the noise multiplier then leaves.
    """

    name: str
    parameters: tuple[str, ...]
    sensitivity: float
    count_noise: float | None = None


class Clipper(ABC):
    """A strategy bound to one model: turns losses into a bounded sum. It never draws noise."""

    bounds: tuple[Bound, ...]
    arithmetic: Arithmetic = IEEE
    adapts: bool = False  # whether `learn` may change the bounds

    @abstractmethod
    def clipped_sum(self, losses: Tensor, real_B: Tensor | None = None) -> dict[str, Tensor]:
        """The bounded sum over the examples of a batch, or of a piece of one.

        By parameter; a part that has none stands there under its own name. `real_B` marks the examples that
        count, where a batch was filled up to a constant size with others.
        """

    @abstractmethod
    def putting_aside(self) -> AbstractContextManager[PutAside]:
        """In this block nothing waits for the device: what hardly ever happens is put aside, to be looked at."""

    def learn(self, means: Mapping[str, Tensor]) -> bool:
        """Adapt to what a step released beside the gradient: noised, over the expected batch size.

        Returns whether `bounds` changed. Between two releases they stay.
        """
        return False

    def state_dict(self) -> dict[str, Any]:
        """What was learned so far, in plain types. It follows from releases, and may be published."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Go back to what a `state_dict` of the same strategy holds. Returns whether `bounds` changed."""
        return False


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


def noised_parts(
    bounds: Sequence[Bound], parameters: Parameters, noise_multiplier: float, split: str, expected_size: float
) -> tuple[Part, ...]:
    """The parts of a step with their noise, such that the joint mechanism has `noise_multiplier`.

    Counts have a noise of their own; the other parts divide by `split` what is left of the multiplier.
    Without noise, for debugging, no part has any.
    """
    own = {b: b.count_noise * expected_size for b in bounds if b.count_noise is not None}
    rest = [b for b in bounds if b not in own]
    z = noise_multiplier
    if own and z > 0:
        z = _multiplier_left(own, z, expected_size)
    elif own:
        own = dict.fromkeys(own, 0.0)
    sizes = [sum(parameters[n].numel() for n in b.parameters) for b in rest]
    stds = own | dict(zip(rest, split_noise([b.sensitivity for b in rest], sizes, z, split), strict=True))
    return tuple(Part(b.name, b.parameters, b.sensitivity, stds[b]) for b in bounds)


def _multiplier_left(counts: Mapping[Bound, float], noise_multiplier: float, expected_size: float) -> float:
    """z' = z / sqrt(1 - u), with u = sum_j (z S_j / s_j)^2 the share of the counts.

    The same as z'^-2 + sum_j (S_j / s_j)^2 = z^-2.
    """
    # Bounds change from step to step and the event does not: rounding must not bring a step below it.
    z = noise_multiplier * (1 + 2.0**-30)
    used = math.hypot(*(z * b.sensitivity / std for b, std in counts.items()))  # sqrt(u)
    if used >= 1:
        enough = 2 * used * max(counts.values()) / expected_size
        raise ConfigurationError(
            f"count_noise is too small: at an expected batch size of {expected_size:g} and with {len(counts)} of them "
            f"the counts alone use up noise_multiplier={noise_multiplier:.4g}, and leave nothing for the gradient. "
            f"Give count_noise={enough:.2g} or more, or take larger batches or fewer parts."
        )
    return z / math.sqrt(1 - used * used)
