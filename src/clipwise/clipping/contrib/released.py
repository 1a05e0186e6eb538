"""Typical norms estimated from releases, without public data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clipwise.clipping.base import damaged
from clipwise.clipping.contrib.typical import Question, Typical
from clipwise.errors import StepError
from clipwise.gradients.real_views import dimension, real_view
from clipwise.validation.arguments import number, with_plain_numbers


@dataclass(frozen=True)
class ReleasedNorms:
    """Typical norms from the released gradients of the run, used instead of public data.

    The release of a step is g + noise with known variance, so for each group h of d_h coordinates

        |released g_h|^2 - sum of the noise's variances

    has mean |g_h|^2. Its running mean over about 1 / (1 - memory) steps is the estimate of e_h^2. Below the standard
    error of the running mean, e_h^2 is that standard error. Before the first release e_h = sqrt(d_h).

    This is the norm of the clipped *mean* gradient, not of an example's gradient, so only ratios between groups are
    used, and rules that need e_h itself raise an error. `Multipliers` preserves these ratios, since all groups are
    clipped by one factor. With `Adaptive` the estimate of a clipped group is limited by its clipping norm, so a small
    clipping norm grows slowly.

    Args:
        memory: the factor of the running mean in each step, at least 0 and below 1.

    Guarantee:
        Post-processing of releases, at no privacy cost.
    """

    memory: float = 0.9

    def __post_init__(self) -> None:
        with_plain_numbers(self)
        number("ReleasedNorms: memory", self.memory, least=0, below=1)

    def describe(self) -> dict[str, Any]:
        return {"released": "gradients of the run", "memory": float(self.memory)}


class Estimated(Typical):
    """`ReleasedNorms` for one model."""

    def __init__(self, rule: ReleasedNorms, question: Question) -> None:
        self._groups, self._memory = question.groups, float(rule.memory)
        parameters = question.site.parameters
        self._sizes = {h: {n: dimension(parameters[n]) for n in names} for h, names in question.groups.items()}
        self.norms = {h: math.sqrt(max(sum(sizes.values()), 1)) for h, sizes in self._sizes.items()}
        self._weight = 0.0  # total weight in the running means: 1 - memory^t
        self._squares = dict.fromkeys(question.groups, 0.0)
        self._variances = dict.fromkeys(question.groups, 0.0)

    def observe(self, means: Mapping[str, Tensor], noise: Mapping[str, float]) -> None:
        """With s the noise on each of d coordinates, |noise|^2 has mean d s^2 and variance 2 d s^4."""
        device = next(iter(means.values())).device
        names = [n for sizes in self._sizes.values() for n in sizes]
        if any(n not in noise for n in names):
            raise StepError(
                "ReleasedNorms(...) requires the noise of each release, which the strategy does not provide."
            )
        energies = torch.stack([real_view(means[n]).double().square().sum().to(device) for n in names]).tolist()
        energy = dict(zip(names, energies, strict=True))
        if not all(map(math.isfinite, energies)):
            return
        keep, new = self._memory, 1 - self._memory
        self._weight = keep * self._weight + new
        for h, sizes in self._sizes.items():
            square = sum(energy[n] - d * noise[n] ** 2 for n, d in sizes.items())
            variance = sum(2 * d * noise[n] ** 4 for n, d in sizes.items())
            self._squares[h] = keep * self._squares[h] + new * square
            self._variances[h] = keep**2 * self._variances[h] + new**2 * variance

    def renew(self) -> bool:
        if self._weight == 0:
            return False
        hidden = {h: math.sqrt(v) for h, v in self._variances.items()}
        return self._take({h: math.sqrt(max(q, hidden[h], 0.0) / self._weight) for h, q in self._squares.items()})

    def state_dict(self) -> dict[str, Any]:
        running = {"weight": self._weight, "squares": dict(self._squares), "variances": dict(self._variances)}
        return super().state_dict() | {"running": running}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        running = state.get("running", {})
        squares, variances = running.get("squares", {}), running.get("variances", {})
        numbers = [running.get("weight"), *squares.values(), *variances.values()]
        if not (
            squares.keys() == variances.keys() == self._groups.keys()
            and all(isinstance(x, float) and math.isfinite(x) for x in numbers)
        ):
            raise damaged("its running means are missing")
        self._weight, self._squares, self._variances = running["weight"], dict(squares), dict(variances)
