"""The noise over all ranks is the declared Gaussian, once for each entry, whatever the sharding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from clipwise import PerExample, make_private
from tests.distributed import jobs
from tests.distributed.world import World, world

pytestmark = pytest.mark.integration

STEPS, NORM, MULTIPLIER = 24, 0.5, 1.5
RATE, RECORDS = 1e-9, 40  # so every batch is empty and a release is noise alone


@pytest.fixture(scope="module", params=[2])
def ranks(request: pytest.FixtureRequest) -> Iterator[World]:
    with world(request.param) as started:
        yield started


def releases(rank: int, layout: str, noise: str = "standard", seed: int | None = None) -> tuple[Tensor, Tensor]:
    """[steps, entries] of noise in standard deviations: of the whole model, and of the entries on this rank."""
    torch.manual_seed(7)  # alike on all ranks
    model = jobs.laid_out(nn.Sequential(nn.Linear(jobs.FEATURES, 41), nn.Sequential(nn.Linear(41, 33))), layout)
    options: dict[str, Any] = {"noise": noise, "seed": seed, "rank_timeout": 60.0}
    everything, own = [], []
    with make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        jobs.data(RECORDS),
        sample_rate=RATE,
        noise_multiplier=MULTIPLIER,
        clipping=PerExample(max_norm=NORM),
        **options,
    ) as private:
        for _ in range(STEPS):
            next(iter(private.loader))
            private.backward(None)
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            everything.append(torch.cat([(g.full_tensor() if isinstance(g, DTensor) else g).flatten() for g in grads]))
            own.append(torch.cat([(g.to_local() if isinstance(g, DTensor) else g).flatten() for g in grads]))
            private.optimizer.step()
    std = NORM * MULTIPLIER / (RATE * RECORDS)
    return torch.stack(everything).double() / std, torch.stack(own).double() / std


def require_standard(sample: Tensor) -> None:
    """Chi-square of the sum of squares, and the sum, within 5 standard deviations."""
    n = sample.numel()
    assert abs(float(sample.square().sum()) - n) < 5 * math.sqrt(2 * n)
    assert abs(float(sample.sum())) < 5 * math.sqrt(n)


def require_uncorrelated(one: Tensor, other: Tensor) -> None:
    n = min(one.numel(), other.numel())
    assert abs(float(one.flatten()[:n] @ other.flatten()[:n])) < 5 * math.sqrt(n)


@pytest.mark.parametrize(
    ("ranks", "layout", "noise"),
    [
        *((2, layout, noise) for layout in ("plain", "ddp", "fsdp", "hsdp") for noise in ("standard", "secure")),
        (4, "fsdp", "standard"),
        (4, "fsdp", "secure"),
        (4, "hsdp", "standard"),
    ],
    indirect=["ranks"],
)
def test_noise_has_the_declared_variance_and_no_correlation(ranks: World, layout: str, noise: str) -> None:
    if noise == "secure":
        pytest.importorskip("cryptography")
    found = ranks.run(releases, layout, noise, 3)  # seeded, for the many comparisons
    whole = found[0][0]
    for other, _ in found[1:]:  # every rank has the same release
        assert torch.equal(other, whole)
    require_standard(whole)
    for row in whole:
        require_standard(row)
    for before, after in pairwise(whole):
        require_uncorrelated(before, after)
    require_uncorrelated(whole[:, :-1], whole[:, 1:])
    shards = [own for _, own in found]
    if layout == "fsdp":
        for number, one in enumerate(shards):
            for other in shards[number + 1 :]:
                require_uncorrelated(one, other)
        assert sum(own.shape[1] for own in shards) == whole.shape[1]  # each entry once
    if layout == "hsdp":  # replicas hold the same entries with the same noise
        half = ranks.size // 2
        assert all(torch.equal(shards[r], shards[r + half]) for r in range(half))


def test_two_runs_without_a_seed_have_other_noise(ranks: World) -> None:
    """The generator of torch is seeded alike in both."""
    first, second = ranks.run(releases, "fsdp")[0][0], ranks.run(releases, "fsdp")[0][0]
    require_uncorrelated(first, second)
    assert not torch.equal(first, second)


def seeded_apart(rank: int, layout: str) -> dict[str, Tensor]:
    torch.manual_seed(1000 + rank)
    torch.randn(rank)
    found: dict[str, Tensor] = jobs.trained(rank, layout, torch_seed=None)["parameters"]
    return found


@pytest.mark.parametrize("layout", ["plain", "fsdp"])
def test_the_generators_of_the_ranks_change_nothing(ranks: World, layout: str) -> None:
    alone = jobs.trained(0)["parameters"]
    assert all(jobs.close_to(found, alone) for found in ranks.run(seeded_apart, layout))
