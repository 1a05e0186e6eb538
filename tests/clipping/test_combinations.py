"""Batch clipping with every policy, unit and option at once: a right joint multiplier, or a refusal that says why."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise import Batch, NoisedStatistics, layers, make_private
from clipwise.contrib import Adaptive, ByNorm, Multipliers, NormDecay, PublicData, RandomLayer, ReleasedNorms, Sparse
from clipwise.errors import ConfigurationError
from clipwise.privacy import Part
from clipwise.sampling import augmentation

N, Z, C, R, SHARE, STEPS = 24, 1.3, 0.7, 0.4, 0.3, 12


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def local_update(model: nn.Module, microbatch: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        loss(model, *microbatch).mean().backward()
        optimizer.step()


def rows(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    return TensorDataset(torch.randn(count, 1, 4, 4, generator=generator), torch.arange(count) % 3)


def public() -> PublicData:
    return PublicData(rows(8), loss, batch_size=4)


PARTS: dict[str, Any] = {
    "all": lambda: "all",
    "layer": lambda: "layer",
    "tensor": lambda: "tensor",
    "groups": lambda: {"first": ["0", "1"], "last": ["4"]},
    "enhanced": lambda: Adaptive(public(), every=1),
    "zhang": lambda: Adaptive(public(), kind="zhang", of="microbatch", microbatch_size=4, every=2),
    "adaptive, released": lambda: Adaptive(ReleasedNorms(), every=1),
    "optimal": lambda: Multipliers(public(), every=1),
    "paper": lambda: Multipliers(public(), kind="paper"),
    "multipliers, released": lambda: Multipliers(ReleasedNorms(), every=1),
    "by norm": lambda: ByNorm(public(), groups=2),
    "by norm, released": lambda: ByNorm(ReleasedNorms(), groups=2, every=1),
    "random layer": lambda: RandomLayer(),
}
UNITS = {"whole batch": 1, "microbatches": 4, "users": None}
OPTIONS = ("local update", "decay", "sparse", "statistics", "views", "equal")
ALL = [
    (parts, unit, tuple(itertools.compress(OPTIONS, chosen)))
    for parts, unit, chosen in itertools.product(PARTS, UNITS, itertools.product([0, 1], repeat=len(OPTIONS)))
    if not {"local update", "statistics"} <= set(itertools.compress(OPTIONS, chosen))
]
# All 1,872 take minutes. So many of them hold nearly every pair of choices.
SOME = random.Random(6).sample(ALL, 50)


def strategy(parts: str, unit: str, options: tuple[str, ...]) -> Batch:
    return Batch(
        NormDecay(C, 0.5, every=3) if "decay" in options else C,
        UNITS[unit] or 1,
        PARTS[parts](),
        "equal" if "equal" in options else "optimal",
        local_update if "local update" in options else None,
        Sparse(every=10, within=3.0) if "sparse" in options else None,
        NoisedStatistics(R, share=SHARE) if "statistics" in options else None,
    )


def multiplier(parts: list[Part]) -> float:
    """(sum_k (S_k / s_k)^2)^(-1/2); the worst of parts that a unit moves alone. Computed independently."""
    shares = [p.sensitivity / p.noise_std for p in parts if not p.alone]
    worst = max((p.sensitivity / p.noise_std for p in parts if p.alone), default=0.0)
    return 1 / math.hypot(worst, *shares)


@pytest.mark.parametrize(("parts", "unit", "options"), SOME, ids=str)
def test_every_step_has_the_given_multiplier(parts: str, unit: str, options: tuple[str, ...]) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    model = layers.without_running_statistics(net)
    is_user = UNITS[unit] is None
    private = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        rows(N),
        clipping=strategy(parts, unit, options),
        group=[i % 8 for i in range(N)] if is_user else None,
        batch_size=4 if is_user else 12,
        noise_multiplier=Z,
        augmentation=augmentation.Views(2, augmentation.Flip()) if "views" in options else None,
        seed=1,
    )
    factor = 1 if is_user else 2  # a user is a whole microbatch; a record can reverse the mean of its own
    while private.steps < STEPS:
        for batch in private.loader.pieces():
            if "local update" in options:
                is_done = private.step_local_update(batch)
            else:
                is_done = private.step(loss(model, *batch) if len(batch[0]) else model(batch[0]).sum(1))
            if not is_done:
                continue
            found = private.parts()
            assert multiplier(found) == pytest.approx(Z, rel=1e-9)
            gradient = [p for p in found if p.parameters]
            beside = [p for p in found if not p.parameters]
            assert {p.sensitivity for p in beside} == ({factor * R} if "statistics" in options else set())
            assert sorted(n for p in gradient for n in p.parameters) == sorted(dict(model.named_parameters()))
            if beside:
                assert multiplier(gradient) == pytest.approx(Z / math.sqrt(1 - SHARE), rel=1e-9)
            if parts in ("all", "layer", "groups", "tensor") and "sparse" not in options:
                decayed = C * (0.5 ** (private.steps // 3) if "decay" in options else 1)
                total = math.hypot(*(p.sensitivity for p in gradient))
                assert total == pytest.approx(factor * decayed, rel=1e-9)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    assert f"noise multiplier {Z}" in str(private.statement())


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="local_update runs on a copy"):
        strategy("all", "users", ("local update", "statistics"))
