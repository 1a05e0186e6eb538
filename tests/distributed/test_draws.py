"""Over all ranks, each record of the data set is included independently with probability q."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise import make_private
from tests.distributed.world import World, world

pytestmark = pytest.mark.integration

RECORDS, RATE, STEPS = 12, 0.15, 600


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    with world(2) as started:
        yield started


def drawn(rank: int) -> Tensor:
    """[steps, records]: which records this rank got."""
    torch.manual_seed(3)  # alike on all ranks
    data = TensorDataset(torch.arange(RECORDS, dtype=torch.float32)[:, None])
    model = nn.Linear(1, 1)
    found = torch.zeros(STEPS, RECORDS, dtype=torch.bool)
    with make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        data,
        sample_rate=RATE,
        noise_multiplier=1.0,
        seed=3,  # so that the comparisons below pass always or never
        probe_independence=False,
        rank_timeout=60.0,
    ) as private:
        step = 0
        while step < STEPS:
            for (x,) in private.loader:
                assert not found[step, x[:, 0].long()].any()
                found[step, x[:, 0].long()] = True
                private.step(model(x)[:, 0] if len(x) else None)
                step += 1
                if step == STEPS:
                    break
        assert private.steps == STEPS
    return found


def near(count: float, n: int, p: float) -> bool:
    """Within 5 standard deviations of a binomial distribution."""
    return abs(count - n * p) < 5 * math.sqrt(n * p * (1 - p))


@pytest.fixture(scope="module")
def on_ranks(ranks: World) -> list[Tensor]:
    return ranks.run(drawn)


def test_inclusion_is_poisson_over_the_whole_data_set(on_ranks: list[Tensor]) -> None:
    on_0, on_1 = on_ranks
    assert not (on_0 & on_1).any()  # no record is on two ranks
    both = (on_0 | on_1).double()
    expected = STEPS * RATE
    chi = float(((both.sum(0) - expected) ** 2 / (expected * (1 - RATE))).sum())
    assert abs(chi - RECORDS) < 5 * math.sqrt(2 * RECORDS)
    pairs = both.T @ both  # also of records that are on different ranks
    for i in range(RECORDS):
        for j in range(i):
            assert near(float(pairs[i, j]), STEPS, RATE**2)
    across = float((on_0.double().T @ on_1.double()).sum())
    assert across > 0
    sizes = both.sum(1)
    for size in range(5):
        p = math.comb(RECORDS, size) * RATE**size * (1 - RATE) ** (RECORDS - size)
        assert near(float((sizes == size).sum()), STEPS, p)  # with 0: empty batches are kept
    between = float((both[:-1] * both[1:]).sum())  # no dependence between steps
    assert near(between, (STEPS - 1) * RECORDS, RATE**2)


def test_both_ranks_have_an_equal_share(on_ranks: list[Tensor]) -> None:
    on_0, on_1 = on_ranks
    shares = on_0.sum(1) - on_1.sum(1)
    assert set(shares.tolist()) <= {0, 1}
    assert (on_1.sum(1) == 0).any()  # a rank without records takes part
