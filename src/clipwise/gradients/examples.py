"""The result of every method: the gradients of all examples of one batch, as norms, sums or written out."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from clipwise.gradients.derived import Path
from clipwise.gradients.forms import Budget, Written, at_least_float32
from clipwise.gradients.join import Contribution
from clipwise.gradients.precision import ieee_arithmetic

KEEP_BYTES = 512 * 2**20  # per-example gradients kept from the norms until the weighted sum

Parameters = Mapping[str, torch.nn.Parameter]


class PerExampleGradients:
    """The gradients of all examples of one batch, by parameter."""

    def __init__(self, batch: int, by_parameter: dict[str, Contribution]) -> None:
        self.batch = batch
        self.by_parameter = by_parameter

    @classmethod
    def written(cls, gradients: Mapping[str, Tensor], parameters: Parameters) -> PerExampleGradients:
        """From gradients that are at hand: [B, *shape] by parameter."""
        batch = len(next(iter(gradients.values())))
        return cls(
            batch,
            {
                name: Contribution(Written.of(at_least_float32(g)), Path.identity(name, parameters[name]))
                for name, g in gradients.items()
            },
        )

    @torch.no_grad()
    @ieee_arithmetic()
    def squared_norms(self) -> dict[str, Tensor]:
        """Upper bounds on each example's squared norm, by parameter: [B] in float64."""
        budget = Budget(KEEP_BYTES)
        return {name: c.form.squared_norms(budget) for name, c in self.by_parameter.items()}

    def mute(self, muted_B: Tensor) -> None:
        """Make the gradients of these examples 0."""
        for c in self.by_parameter.values():
            c.form.mute(muted_B)

    @torch.no_grad()
    @ieee_arithmetic()
    def weighted_sums(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """sum_i w_i gradient_i, by parameter, with each parameter's own weights [B]; in float32 or better."""
        return {
            name: at_least_float32(c.path.pull(c.form.weighted_sum(weights[name]))[name])
            for name, c in self.by_parameter.items()
        }

    @torch.no_grad()
    @ieee_arithmetic()
    def instantiate(self, examples: slice) -> dict[str, Tensor]:
        """The gradients of some examples, written out: [b, *shape]."""
        return {
            name: c.path.pull_each(c.form.instantiate(examples))[name]
            for name, c in self.by_parameter.items()
        }

    def mass(self, example: int) -> float:
        """The size of the terms that an example's gradient is summed from, over all parameters."""
        return math.hypot(*(c.form.mass(example) for c in self.by_parameter.values()))
