"""The mean gradient is clipped, and the sensitivity is stated as if each example were."""

import pytest
import torch
from torch import Tensor

from clipwise.clipping.per_example import PerExampleClipper
from tests.audit.bug import Bug


def plant(patch: pytest.MonkeyPatch) -> None:
    def clipped_mean(self: PerExampleClipper, losses: Tensor, real_B: Tensor | None = None) -> dict[str, Tensor]:
        names, bound = list(self._parameters), self.bounds[0].sensitivity
        if not len(losses):
            return {name: torch.zeros_like(p) for name, p in self._parameters.items()}
        found = torch.autograd.grad(losses.mean(), [self._parameters[n] for n in names], allow_unused=True)
        gradients = [
            torch.zeros_like(self._parameters[n]) if g is None else g for n, g in zip(names, found, strict=True)
        ]
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        weight = self.divisor * float((bound / norm).clamp(max=1))
        return {name: weight * g for name, g in zip(names, gradients, strict=True)}

    patch.setattr(PerExampleClipper, "clipped_sum", clipped_mean)


BUG = Bug("clip after averaging", plant, ("neighbours", "canary"))
