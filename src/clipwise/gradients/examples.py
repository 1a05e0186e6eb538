"""The result of every method: the per-example gradients of one batch, as norms, sums or written out."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from clipwise.gradients.forms import Budget, Written, at_least_float32
from clipwise.gradients.paths import Contribution, Path
from clipwise.gradients.precision import IEEE, Arithmetic, ieee_arithmetic
from clipwise.gradients.rare import Rare

KEEP_BYTES = 512 * 2**20  # per-example gradients kept from the norms to the weighted sum, on a CPU
_KEEP_SHARE = 1 / 16  # of a CUDA device's memory

Parameters = Mapping[str, torch.nn.Parameter]


class PerExampleGradients:
    """The per-example gradients of one batch, keyed by parameter name."""

    def __init__(
        self, batch: int, by_parameter: dict[str, Contribution], arithmetic: Arithmetic = IEEE, rare: Rare | None = None
    ) -> None:
        self.batch = batch
        self.by_parameter = by_parameter
        self._arithmetic, self._rare = arithmetic, rare or Rare()

    @classmethod
    def written(cls, gradients: Mapping[str, Tensor], parameters: Parameters) -> PerExampleGradients:
        """Wrap computed gradients: [B, *shape] for each parameter."""
        batch = len(next(iter(gradients.values())))
        return cls(
            batch,
            {
                name: Contribution(Written.of(at_least_float32(g)), Path.identity(name, parameters[name]))
                for name, g in gradients.items()
            },
        )

    @torch.no_grad()
    def squared_norms(self) -> dict[str, Tensor]:
        """Upper bounds on each example's squared norm, for each parameter: [B] in float64."""
        devices = {p.device for c in self.by_parameter.values() for p in c.path.parameters.values()}
        budget = Budget(keep_bytes(devices), self._arithmetic)
        with self._arithmetic.products():
            squares = {name: c.form.squared_norms(budget) for name, c in self.by_parameter.items()}
            loose = [c.form.loose_B for c in self.by_parameter.values() if c.form.loose_B is not None]
            if loose and self._rare.any(torch.stack(loose)):
                for name, c in self.by_parameter.items():
                    c.form.tighten(squares[name], budget)
        return squares

    def squared_errors(self) -> dict[str, Tensor]:
        """The squared error that rounded operands can add to the norms, for the parameters affected: [B] in float64.

        Available after `squared_norms`.
        """
        found = {name: c.form.squared_error_B for name, c in self.by_parameter.items()}
        return {name: error_B for name, error_B in found.items() if error_B is not None}

    def mute(self, muted_B: Tensor) -> None:
        """Make the gradients of these examples 0."""
        for c in self.by_parameter.values():
            c.form.mute(muted_B)

    @torch.no_grad()
    def weighted_sums(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """sum_i w_i gradient_i for each parameter, with its own weights [B]; in float32 or better."""
        with self._arithmetic.products():
            return {
                name: at_least_float32(c.path.pull(c.form.weighted_sum(weights[name]))[name])
                for name, c in self.by_parameter.items()
            }

    @torch.no_grad()
    def instantiate(self, examples: slice) -> dict[str, Tensor]:
        """The gradients of some examples, written out: [b, *shape]."""
        with ieee_arithmetic():
            return {name: c.path.pull_each(c.form.instantiate(examples))[name] for name, c in self.by_parameter.items()}

    def mass(self, example: int) -> float:
        """The norm of the terms that sum to an example's gradient, over all parameters."""
        return math.hypot(*(c.form.mass(example) for c in self.by_parameter.values()))


def keep_bytes(devices: set[torch.device]) -> int:
    """The number of bytes of per-example gradients that may be kept."""
    cuda = [device for device in devices if device.type == "cuda"]
    if not cuda:
        return KEEP_BYTES
    return int(min(torch.cuda.get_device_properties(d).total_memory for d in cuda) * _KEEP_SHARE)
