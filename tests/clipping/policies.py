"""Every policy for parts, on public data that suits a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise.clipping.contrib.policies import Adaptive, ByNorm, Multipliers
from clipwise.clipping.contrib.random_layer import RandomLayer
from clipwise.clipping.contrib.typical import ReleasedNorms
from clipwise.clipping.public import PublicData
from clipwise.clipping.thresholds import Policy
from tests.gradients.cases import losses

# Names of all of them, for parametrization.
POLICIES = (
    "enhanced",
    "enhanced of microbatches",
    "enhanced by tensor",
    "zhang",
    "released",
    "optimal",
    "paper",
    "relative",
    "released multipliers",
    "by norm",
    "by norm of tensors",
    "random layer",
    "random tensor",
)


def policy(name: str, public: PublicData, every: Any = 1) -> Policy:
    """The policy of that name, which adapts after every release by default."""
    mine: dict[str, Policy] = {
        "enhanced": Adaptive(public, every=every),
        "enhanced of microbatches": Adaptive(public, of="microbatch", every=every),
        "enhanced by tensor": Adaptive(public, groups="tensor", every=every),
        "zhang": Adaptive(public, kind="zhang", every=every),
        "released": Adaptive(ReleasedNorms(), every=every),
        "optimal": Multipliers(public, every=every),
        "paper": Multipliers(public, kind="paper", groups="tensor", every=every),
        "relative": Multipliers(public, relative=True, every=every),
        "released multipliers": Multipliers(ReleasedNorms(), every=every),
        "by norm": ByNorm(public, groups=2, every=every),
        "by norm of tensors": ByNorm(public, groups=3, among="tensor"),
        "random layer": RandomLayer(),
        "random tensor": RandomLayer("tensor"),
    }
    assert set(mine) == set(POLICIES)
    return mine[name]


def loss(model: nn.Module, *inputs: Tensor) -> Tensor:
    return losses(model, inputs)


def small_model() -> nn.Module:
    """Layers whose gradients differ much in length."""
    torch.manual_seed(0)
    on = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    with torch.no_grad():
        on[4].weight *= 0.1
    return on


def rows(count: int, seed: int = 5) -> Tensor:
    return torch.randn(count, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def public(count: int = 12, batch_size: int = 4, seed: int = 5) -> PublicData:
    """For `small_model`."""
    return PublicData(TensorDataset(rows(count, seed)), loss, batch_size=batch_size)
