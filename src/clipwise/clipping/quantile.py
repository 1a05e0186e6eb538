"""Bounds that follow a quantile of the gradient norms.

How many examples are within the bound is one more number in the step's release. What the bound learns from it
has the step's noise on it, so every later bound is public.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from clipwise.clipping.base import Bound
from clipwise.clipping.constants import Constants
from clipwise.clipping.grouping import norms_of_parts
from clipwise.errors import CheckpointError, ConfigurationError
from clipwise.privacy import Adjacency
from clipwise.validation.arguments import with_plain_numbers

_SMALLEST, _LARGEST = 1e-30, 1e30


@dataclass(frozen=True)
class Quantile:
    """A `max_norm` that moves until a share `target` of the examples is not clipped.

    After each step, with f the released fraction of examples whose gradient was within C (one whose norm is
    close to C counts in part),

        C <- C exp(-learning_rate (f - target)),   kept within [minimum, maximum].

    With several parts each has a count and a C_k of its own, and `initial`, `minimum` and `maximum` are
    totals: C_k begins at initial / sqrt(K), and so on.

    Args:
        target: the share of examples that should not be clipped, above 0 and below 1.
        initial: C in the first step.
        learning_rate: how fast log C moves.
        count_noise: the standard deviation of the noise on f; that on the count is s = count_noise L, with L
            the expected batch size. The counts' share comes out of the noise multiplier z that was asked for,
            so that z keeps its meaning: the gradient gets the larger multiplier

                z' = (z^-2 - K (S / s)^2)^(-1/2),   S = 1/2 under zero-out, 1 under replace-one.

            A `count_noise` that leaves nothing for the gradient is refused.
        minimum, maximum: C never leaves these. Public, as all the others.

    Guarantee:
        What is released is sum_i (b_i - 1/2) + noise, b_i = clamp(3/2 - |g_i| / C, 0, 1): an example that is not
        there adds 0, one that is there moves it by at most 1/2, a replaced one by 1. It is divided by L and
        never by the number drawn. A gradient that is not finite counts as clipped.
        b_i is a ramp from C/2 to 3C/2 and no jump at C: the last digits of a norm may depend on the size of the
        batch, and where many norms are alike, a jump would let one example move all of their b_i.
    """

    target: float = 0.5
    initial: float = 1.0
    learning_rate: float = 0.2
    count_noise: float = 0.05
    minimum: float = 1e-6
    maximum: float = 1e6

    def __post_init__(self) -> None:
        with_plain_numbers(self)
        for name, value in asdict(self).items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (number and math.isfinite(value) and value > 0):
                raise ConfigurationError(
                    f"Quantile: {name} must be a positive, finite number, not {value!r}."
                )
        if self.target >= 1:
            raise ConfigurationError(
                f"Quantile: target={self.target!r} must be below 1: it is the share of examples not clipped."
            )
        if self.minimum < _SMALLEST or self.maximum > _LARGEST:
            raise ConfigurationError(
                f"Quantile: minimum={self.minimum!r} and maximum={self.maximum!r} must lie between {_SMALLEST:g} and "
                f"{_LARGEST:g}, where sums and noise of float32 are safe."
            )
        if not self.minimum <= self.initial <= self.maximum:
            raise ConfigurationError(
                f"Quantile: initial={self.initial!r} must lie between minimum={self.minimum!r} and "
                f"maximum={self.maximum!r}: widen them, or begin within them."
            )

    def describe(self) -> dict[str, Any]:
        """The configuration in plain types."""
        return {"rule": "quantile", **asdict(self)}


class QuantileNorms(Constants):
    """`Quantile` for the parts of one model: C_k of the moment."""

    lasts = 1

    def __init__(
        self, quantile: Quantile, groups: dict[str, list[str]], taken: Container[str], adjacency: Adjacency
    ) -> None:
        parts = list(groups)
        super().__init__(groups, norms_of_parts(quantile.initial, parts))
        self._quantile = quantile
        self._least = norms_of_parts(quantile.minimum, parts)
        self._most = norms_of_parts(quantile.maximum, parts)
        self._names = {part: f"count of {part}" for part in parts}
        for name in self._names.values():
            if name in taken:
                raise ConfigurationError(
                    f"max_norm=Quantile(...) needs the name {name!r}: rename that parameter."
                )
        # b - 1/2 is -1/2 or 1/2: an example brings one of them, and a replaced one goes from one to the other.
        sensitivity = 1.0 if adjacency is Adjacency.REPLACE_ONE else 0.5
        self.bounds = tuple(
            Bound(name, (), sensitivity, quantile.count_noise) for name in self._names.values()
        )

    def counts(
        self, norms: Mapping[str, Tensor], muted_B: Tensor, real_B: Tensor | None = None
    ) -> dict[str, Tensor]:
        """sum_i (b_i - 1/2) of each part over the examples that are real, in float64; 0 for an empty batch."""
        counted_B = torch.ones_like(muted_B) if real_B is None else real_B
        return {
            self._names[part]: (_within(norms[part], C, muted_B) - 0.5).mul(counted_B).sum().reshape(1)
            for part, C in self.norms.items()
        }

    def learn(self, means: Mapping[str, Tensor], noise: Mapping[str, float] | None = None) -> bool:
        """C <- C exp(-learning_rate (f - target)); by logarithms, since exp may overflow before the limits."""
        rule = self._quantile
        for part, C in self.norms.items():
            fraction = float(means[self._names[part]]) + 0.5
            log_C = math.log(C) - rule.learning_rate * (fraction - rule.target)
            least, most = self._least[part], self._most[part]
            log_C = min(max(log_C, math.log(least)), math.log(most))
            self.norms[part] = min(max(math.exp(log_C), least), most)
        return True

    def state_dict(self) -> dict[str, Any]:
        """C_k of each part. It follows from what was released, and may be published."""
        return {"norms": dict(self.norms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Go back to the C_k of a `state_dict`; refuses what no run of this configuration can have had."""
        norms = state.get("norms")
        if not (
            isinstance(norms, dict)
            and norms.keys() == self.norms.keys()
            and all(isinstance(C, float) and self._least[k] <= C <= self._most[k] for k, C in norms.items())
        ):
            raise CheckpointError(
                "This state_dict of a private run is damaged: its norms are missing or out of range. Use the one "
                "saved before it."
            )
        self.norms.update(norms)
        return True


def _within(norm_B: Tensor, C: float, muted_B: Tensor) -> Tensor:
    """b_i: 1 for a norm up to C/2, 0 from 3C/2 on, and a straight line between the two."""
    return (1.5 - norm_B.to(torch.float64) / C).clamp(0, 1).masked_fill(muted_B, 0)
