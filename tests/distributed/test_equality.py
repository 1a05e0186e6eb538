"""With a given seed, any number of ranks gives the parameters and the statement of a single process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from clipwise import augment
from tests.distributed import jobs
from tests.distributed.world import World, world

pytestmark = pytest.mark.integration

SCHEMES: dict[str, dict[str, Any]] = {
    "poisson": {},
    "truncated-poisson": {"sampling": "truncated-poisson"},
    "fixed-size": {"sampling": "fixed-size"},
    "shuffled": {"sampling": "shuffled", "batch_size": 7},
    "full": {"sampling": "full"},
    # Expected batches of 1.2 records: most ranks have none in most steps.
    "rare": {"batch_size": None, "sample_rate": 0.03, "steps_taken": 8},
    "pieces": {"max_physical_batch_size": 2},
    "views": {"augmentation": augment.Views(2)},
    "ema": {"ema": 0.9},
    "secure": {"noise": "secure"},
    "adam": {"optimizer": "adam"},
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    with world(2) as started:
        yield started


@pytest.fixture(scope="module")
def four() -> Iterator[World]:
    with world(4) as started:
        yield started


def together(rank: int, arguments: dict[str, Any]) -> dict[str, Any]:
    arguments = dict(arguments)
    steps = arguments.pop("steps_taken", 4)
    return jobs.trained(rank, steps=steps, **arguments)


def compare(ranks: World, tolerance: float = 2e-5, **arguments: Any) -> None:
    alone = together(0, arguments | {"layout": "plain"})
    for found in ranks.run(together, arguments):
        assert jobs.close_to(found["parameters"], alone["parameters"], tolerance)
        assert found["statement"] == alone["statement"]
        assert found["steps"] == alone["steps"]
        if "averages" in alone:
            assert jobs.close_to(found["averages"], alone["averages"], tolerance)
            assert not jobs.close_to(found["averages"], found["parameters"])


@pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp"])
@pytest.mark.parametrize("strategy", ["per-example", "per-layer", "quantile", "reweight", "batch", "backprop"])
def test_every_strategy_trains_the_same_model(ranks: World, layout: str, strategy: str) -> None:
    compare(ranks, layout=layout, strategy=strategy)


@pytest.mark.parametrize("layout", ["plain", "ddp"])
@pytest.mark.parametrize("strategy", ["lipschitz", "public"])
def test_bounds_and_statistics_of_whole_weights_train_the_same_model(ranks: World, layout: str, strategy: str) -> None:
    compare(ranks, layout=layout, strategy=strategy)


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_and_option_trains_the_same_model(ranks: World, layout: str, scheme: str) -> None:
    if scheme == "secure":
        pytest.importorskip("cryptography")
    compare(ranks, layout=layout, **SCHEMES[scheme])


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("sampling", ["poisson", "partition"])
def test_whole_microbatches_go_to_one_rank(ranks: World, layout: str, sampling: str) -> None:
    if sampling == "partition":
        compare(ranks, layout=layout, strategy="batch", sampling="partition")
    else:
        owners = [i % 9 for i in range(40)]
        compare(ranks, layout=layout, strategy="users", group=owners, batch_size=4)


@pytest.mark.parametrize("layout", ["hsdp", "fsdp-offload"])
def test_other_shardings_train_the_same_model(ranks: World, layout: str) -> None:
    compare(ranks, layout=layout)
    compare(ranks, layout=layout, strategy="quantile", optimizer="adam")


def test_bf16_parameters_are_summed_and_updated_in_float32(ranks: World) -> None:
    """Forward passes round to 8 bits, so only the noise and the updates are exact."""
    compare(ranks, layout="fsdp-bf16", tolerance=0.02)


def deterministic(rank: int, layout: str) -> dict[str, torch.Tensor]:
    torch.use_deterministic_algorithms(True)
    try:
        found: dict[str, torch.Tensor] = jobs.trained(rank, layout)["parameters"]
    finally:
        torch.use_deterministic_algorithms(False)
    return found


@pytest.mark.parametrize("layout", ["plain", "fsdp"])
def test_sums_in_the_order_of_ranks_give_the_same_bits(ranks: World, layout: str) -> None:
    first, second = ranks.run(deterministic, layout)[0], ranks.run(deterministic, layout)[-1]
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert jobs.close_to(first, jobs.trained(0)["parameters"])


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "hsdp"])
@pytest.mark.parametrize("scheme", ["poisson", "rare", "shuffled", "pieces", "secure"])
def test_four_ranks_train_the_same_model(four: World, layout: str, scheme: str) -> None:
    """Some shards of the parameters are empty, and most ranks have no records in the rare batches."""
    if scheme == "secure":
        pytest.importorskip("cryptography")
    compare(four, layout=layout, **SCHEMES[scheme])


@pytest.mark.parametrize("strategy", ["quantile", "batch", "backprop"])
def test_strategies_on_four_ranks_train_the_same_model(four: World, strategy: str) -> None:
    compare(four, layout="fsdp", strategy=strategy)
