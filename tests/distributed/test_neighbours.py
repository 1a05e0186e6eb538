"""Neighbouring data sets over two ranks: a release changes by its declared sensitivity at most."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch.utils.data import Dataset

from clipwise import PerExample, Private, audit, make_private
from tests.distributed import jobs
from tests.distributed.world import World, world

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    with world(2) as started:
        yield started


def run(layout: str, data: Dataset[tuple[torch.Tensor, ...]]) -> Private:
    model = jobs.laid_out(jobs.network(), layout)
    private = make_private(
        model,
        jobs.optimizer_of("sgd", model),
        data,
        batch_size=8,
        noise_multiplier=1.0,
        clipping=PerExample(1.0),
        rank_timeout=60.0,
        **jobs.needs(layout),
    )
    with private:
        jobs.train(model, private, 6)
    return private


def audited(rank: int, layout: str) -> tuple[int, int, float, list[str]]:
    records = range(36, 40)  # of both ranks
    report = audit.neighbours(partial(run, layout), jobs.data(), records=records)
    return report.pairs, report.moved, report.worst, [str(finding) for finding in report.findings]


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tensor"])
def test_a_record_moves_the_sum_of_all_ranks_by_its_sensitivity_at_most(ranks: World, layout: str) -> None:
    first, second = ranks.run(audited, layout)
    pairs, moved, worst, findings = first
    assert not findings
    assert pairs > 1 and moved > 0
    assert 0.95 < worst <= 1.0 + 1e-4  # the norm over all shards
    assert second == first
