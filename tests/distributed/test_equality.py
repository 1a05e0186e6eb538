"""With a given seed, any number of ranks gives the parameters and the statement of a single process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from clipwise import PerExample, augment, make_private
from clipwise.distributed import sums
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
    "rare": {"batch_size": None, "sample_rate": 0.03, "steps_taken": 6},
    "pieces": {"max_physical_batch_size": 2},
    "views": {"augmentation": augment.Views(2)},
    "ema": {"ema": 0.9},
    "secure": {"noise": "secure"},
    "adam": {"optimizer": "adam"},
}


DRAWS = ("poisson", "truncated-poisson", "fixed-size", "shuffled", "full", "rare")
REPLICATED = ("per-example", "per-layer", "quantile", "reweight", "batch", "backprop", "lipschitz", "public")
SHARDED = REPLICATED[:-2]  # these need no whole weights


@pytest.fixture(scope="module")
def one() -> Iterator[World]:
    with world(1) as started:
        yield started


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    with world(2) as started:
        yield started


@pytest.fixture(scope="module")
def four() -> Iterator[World]:
    with world(4) as started:
        yield started


@cache
def alone(strategy: str, scheme: str) -> dict[str, Any]:
    """The results of a single process."""
    return together(0, {"strategy": strategy, "steps_taken": 2} | SCHEMES[scheme])


def everywhere(rank: int, layout: str, strategy: str) -> dict[str, dict[str, Any]]:
    """The results of this rank for every way to draw batches."""
    options = {"layout": layout, "strategy": strategy, "steps_taken": 2}
    return {scheme: together(rank, options | SCHEMES[scheme]) for scheme in DRAWS}


def together(rank: int, arguments: dict[str, Any]) -> dict[str, Any]:
    arguments = dict(arguments)
    steps = arguments.pop("steps_taken", 4)
    return jobs.trained(rank, steps=steps, **arguments)


def compare(ranks: World, tolerance: float = 2e-5, **arguments: Any) -> None:
    expected = together(0, arguments | {"layout": "plain"})
    for found in ranks.run(together, arguments):
        assert jobs.close_to(found["parameters"], expected["parameters"], tolerance)
        assert found["statement"] == expected["statement"]
        assert found["steps"] == expected["steps"]
        if "averages" in expected:
            assert jobs.close_to(found["averages"], expected["averages"], tolerance)
            assert not jobs.close_to(found["averages"], found["parameters"])


@pytest.mark.parametrize("count", ["one", "ranks", "four"])
@pytest.mark.parametrize(
    ("layout", "strategy"), [*(("ddp", name) for name in REPLICATED), *(("fsdp", name) for name in SHARDED)]
)
def test_every_strategy_and_scheme_trains_the_same_model(
    request: pytest.FixtureRequest, count: str, layout: str, strategy: str
) -> None:
    """With four ranks some shards of the parameters are empty, and most ranks have no records in the rare batches."""
    for results in request.getfixturevalue(count).run(everywhere, layout, strategy):
        for scheme, found in results.items():
            expected = alone(strategy, scheme)
            assert jobs.close_to(found["parameters"], expected["parameters"]), scheme
            assert found["statement"] == expected["statement"]
            assert found["steps"] == expected["steps"]


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name not in DRAWS])
def test_every_option_trains_the_same_model(ranks: World, layout: str, scheme: str) -> None:
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
@pytest.mark.parametrize("scheme", ["pieces", "secure"])
def test_four_ranks_train_the_same_model(four: World, layout: str, scheme: str) -> None:
    if scheme == "secure":
        pytest.importorskip("cryptography")
    compare(four, layout=layout, **SCHEMES[scheme])


@pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp", "fsdp-bf16"])
def test_checkpointed_activations_train_the_same_model(ranks: World, layout: str) -> None:
    compare(ranks, tolerance=0.02 if layout == "fsdp-bf16" else 2e-5, layout=layout, strategy="checkpointed")


def compiled(rank: int, layout: str, options: dict[str, Any], steps: int) -> tuple[dict[str, torch.Tensor], bool]:
    """The parameters, and whether the last steps used a traced graph."""
    model = jobs.laid_out(jobs.network(), layout)
    private = make_private(
        model,
        jobs.optimizer_of("sgd", model),
        jobs.data(),
        noise_multiplier=1.0,
        clipping=PerExample(max_norm=1.0),
        seed=1,
        rank_timeout=60.0,
        **options,
    )
    with private:
        step = private.compiled(lambda x, y: jobs.losses_of(model, (x, y)), backend="aot_eager")
        while steps:
            for batch in private.loader.pieces():
                steps -= step(*batch)
                if not steps:
                    break
        return jobs.whole(model), step.form == "traced"


@pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp"])
@pytest.mark.parametrize(
    "options", [{"batch_size": 8}, {"batch_size": 8, "max_physical_batch_size": 2}, {"sample_rate": 0.1}]
)
def test_compiled_steps_train_the_same_model(four: World, layout: str, options: dict[str, Any]) -> None:
    """Each rank decides by itself when to use its graph. With the smallest batches most ranks have no records."""
    found = four.run(compiled, layout, options, 40)
    expected = jobs.trained(0, steps=40, **({"batch_size": None} | options))["parameters"]
    assert all(jobs.close_to(parameters, expected) for parameters, _ in found)
    is_traced = [is_used for _, is_used in found]
    assert not any(is_traced) if layout == "fsdp" else any(is_traced)


def in_small_buckets(rank: int, layout: str, is_deterministic: bool) -> dict[str, torch.Tensor]:
    size, sums.BUCKET = sums.BUCKET, 8  # so that several are on their way at once
    try:
        return deterministic(rank, layout) if is_deterministic else jobs.trained(rank, layout)["parameters"]
    finally:
        sums.BUCKET = size


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "hsdp"])
def test_sums_in_many_buckets_train_the_same_model(four: World, layout: str, is_deterministic: bool) -> None:
    expected = jobs.trained(0)["parameters"]
    for found in four.run(in_small_buckets, layout, is_deterministic):
        assert jobs.close_to(found, expected)
