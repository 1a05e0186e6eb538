"""What is not supported over several ranks is refused on every rank, by name and before the first step."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import pipeline
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, TensorDataset, random_split

from clipwise import Batch, MemoryLedger, PerExample, contrib, make_private
from clipwise.errors import PrivacyWarning, StepError
from tests.distributed import jobs
from tests.distributed.world import World, world

pytestmark = pytest.mark.integration

Run = dict[str, Any]


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    with world(2) as started:
        yield started


def run_with(model: nn.Module, **options: Any) -> Run:
    defaults = {"dataset": jobs.data(), "batch_size": 8, "noise_multiplier": 1.0, "clipping": PerExample(1.0)}
    return {"model": model} | defaults | options


def buffers_in_ddp(rank: int) -> Run:
    model = jobs.network()
    model.register_buffer("scale", torch.ones(1))
    return run_with(DistributedDataParallel(model))


def first_fsdp(rank: int) -> Run:
    return run_with(FullyShardedDataParallel(jobs.network(), device_id=torch.device("cpu")))


def inner_first_fsdp(rank: int) -> Run:
    model = jobs.network()
    model[2] = FullyShardedDataParallel(model[2], device_id=torch.device("cpu"))
    return run_with(model)


def deepspeed_engine(rank: int) -> Run:
    return run_with(type("DeepSpeedEngine", (nn.Sequential,), {})(nn.Linear(jobs.FEATURES, 3)))


def deepspeed_weights(rank: int) -> Run:
    model = jobs.network()
    model[0].weight.ds_id = 0  # type: ignore[assignment]
    return run_with(model)


def sharded_optimizer(rank: int) -> Run:
    model = jobs.network()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    return run_with(model, optimizer=optimizer)


def tensor_parallel(rank: int, **options: Any) -> Run:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    layers = nn.Sequential(nn.Linear(jobs.FEATURES, 4), nn.LayerNorm(4))
    model = parallelize_module(layers, mesh, {"0": ColwiseParallel()})
    with torch.no_grad():
        layers[1].weight += options.pop("unequal", 0) * rank
    return run_with(model, **({"max_physical_batch_size": 1} | options))


def tensor_parallel_and_sharded(rank: int) -> Run:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Sequential(nn.Linear(jobs.FEATURES, 4)), mesh["tp"], {"0": ColwiseParallel()})
    return run_with(fully_shard(model, mesh=mesh["dp"]))


def split_over_one_rank(rank: int) -> Run:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "other"))
    layers = nn.Sequential(nn.Linear(jobs.FEATURES, 4), nn.Linear(4, 4))
    model = parallelize_module(layers, mesh["tp"], {"0": ColwiseParallel()})
    return run_with(parallelize_module(model, mesh["other"], {"1": ColwiseParallel()}), max_physical_batch_size=1)


def sharded_parts_only(rank: int) -> Run:
    model = jobs.network()
    fully_shard(model[2])
    return run_with(model)


def sharded_over_one_rank(rank: int) -> Run:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("apart", "shards"))
    return run_with(fully_shard(jobs.network(), mesh=mesh["shards"]))


def mesh_in_another_order(rank: int) -> Run:
    return run_with(fully_shard(jobs.network(), mesh=DeviceMesh("cpu", [1, 0])))


def sharded_with(strategy: str, rank: int) -> Run:
    model = jobs.laid_out(jobs.MODELS[strategy](), "fsdp")
    return run_with(model, clipping=jobs.STRATEGIES[strategy]())


def sharded_sparse(rank: int) -> Run:
    return run_with(jobs.laid_out(jobs.network(), "fsdp"), clipping=PerExample(1.0, sparse=contrib.Sparse()))


def parts_of_the_data(rank: int) -> Run:
    rows = TensorDataset(*(t[rank::2] for t in jobs.data().tensors))
    return run_with(jobs.network(), dataset=rows)


class Rows(Dataset[Any]):
    """Records of a data set of the user. With `noise` they differ each time they are read."""

    def __init__(self, order: Tensor, noise: float = 0.0) -> None:
        self._tensors, self._noise = tuple(t[order] for t in jobs.data().tensors), noise

    def __len__(self) -> int:
        return len(self._tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = (t[index] for t in self._tensors)
        return x + self._noise * torch.randn(()), y


def split_by_seed(rank: int) -> Run:
    split = random_split(Rows(torch.arange(40), noise=1.0), [30, 10], torch.Generator().manual_seed(rank))
    return run_with(jobs.network(), dataset=split[0])


def ordered_by_seed(rank: int) -> Run:
    order = torch.randperm(40, generator=torch.Generator().manual_seed(rank))
    return run_with(jobs.network(), dataset=Rows(order))


def other_noise(rank: int) -> Run:
    return run_with(jobs.network(), noise_multiplier=1.0 + rank)


def other_sampling(rank: int) -> Run:
    return run_with(jobs.network(), sampling="poisson" if rank else "fixed-size")


def open_ledger(rank: int) -> Run:
    return run_with(jobs.network(), ledger=MemoryLedger())


def wrong_on_rank_1(rank: int) -> Run:
    return run_with(jobs.network(), clipping=PerExample(1.0) if rank == 0 else "clip")


def other_layers(rank: int) -> Run:
    return run_with(jobs.network()[2 * rank :])


def pipelined(rank: int) -> Run:
    layers = nn.Sequential(nn.Linear(jobs.FEATURES, 4), nn.Linear(4, jobs.CLASSES))
    return run_with(pipeline(layers, mb_args=(torch.zeros(2, jobs.FEATURES),)))


REFUSED: dict[str, tuple[Callable[[int], Run], str]] = {
    "buffers in DDP": (buffers_in_ddp, "broadcast_buffers=False"),
    "FSDP1": (first_fsdp, "FSDP1 (FullyShardedDataParallel) is not supported"),
    "FSDP1 inside": (inner_first_fsdp, "FSDP1 (FullyShardedDataParallel) is not supported"),
    "DataParallel": (lambda _: run_with(nn.DataParallel(jobs.network())), "torch.nn.DataParallel is not supported"),
    "DeepSpeed": (deepspeed_engine, "DeepSpeed (DeepSpeedEngine) is not supported"),
    "ZeRO-3": (deepspeed_weights, "DeepSpeed (ZeRO stage 3) is not supported"),
    "ZeroRedundancyOptimizer": (sharded_optimizer, "ZeroRedundancyOptimizer is not supported"),
    "split: whole batches": (partial(tensor_parallel, max_physical_batch_size=None), "max_physical_batch_size=1"),
    "split: Batch": (partial(tensor_parallel, clipping=Batch(1.0, microbatches=8)), "clipping=Batch with these"),
    "split: Sparse": (
        partial(tensor_parallel, clipping=PerExample(1.0, sparse=contrib.Sparse())),
        "sparse=Sparse(...) is not supported with tensor",
    ),
    "split: loss": (partial(tensor_parallel, loss=lambda x, y: x.sum(1)), "loss= is not supported with tensor"),
    "split: penalty": (partial(tensor_parallel, penalty=lambda model: 0.0), "penalty is not supported with tensor"),
    "split: two meshes": (split_over_one_rank, "on the same mesh dimension for all layers"),
    "split: other weights": (partial(tensor_parallel, unequal=1), "The weights are not the same on all ranks"),
    "split and FSDP2": (tensor_parallel_and_sharded, "(parallelize_module) together with fully_shard"),
    "parts of a model": (sharded_parts_only, "call fully_shard(model) last"),
    "a part of the ranks": (sharded_over_one_rank, "shard the model over all ranks"),
    "another order of ranks": (mesh_in_another_order, "with ranks that rise along each of its dimensions"),
    "sharded Lipschitz": (partial(sharded_with, "lipschitz"), "Lipschitz is not supported for a model sharded"),
    "sharded PublicBatchNorm": (partial(sharded_with, "public"), "PublicBatchNorm is not supported for a model"),
    "sharded Sparse": (sharded_sparse, "sparse=Sparse(...) is not supported for a model sharded"),
    "a DistributedSampler's part": (parts_of_the_data, "Give every rank the whole data set"),
    "a random split on each rank": (split_by_seed, "Give every rank the whole data set"),
    "another order on each rank": (ordered_by_seed, "Give every rank the whole data set"),
    "another multiplier": (other_noise, "do not have the same arguments"),
    "another scheme": (other_sampling, "do not have the same arguments"),
    "two open ledgers": (open_ledger, "ledger= is an open ledger on a rank other than 0"),
    "an error on one rank": (wrong_on_rank_1, "ConfigurationError: clipping must be a strategy"),
    "other layers": (other_layers, "model does not have the same parameters on every rank"),
    "pipelining": (pipelined, "Pipeline parallelism (torch.distributed.pipelining) is not supported"),
}


def refused(rank: int, case: str) -> str:
    """The last line of the error of `make_private` on this rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = REFUSED[case][0](rank)
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(options["model"].parameters(), lr=0.1)
    try:
        make_private(optimizer=optimizer, rank_timeout=60.0, **options)
    except Exception as error:
        return "".join(traceback.format_exception_only(error))
    return ""


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_set_ups_are_refused_on_every_rank(ranks: World, case: str) -> None:
    expected = REFUSED[case][1]
    found = ranks.run(refused, case)
    assert all("clipwise.errors." in text for text in found), found
    assert any(expected in text for text in found), found
    others = [text for text in found if expected not in text]
    assert all("has stopped:" in text for text in others), found


def with_random_records(rank: int) -> int:
    model = jobs.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = run_with(model, dataset=Rows(torch.arange(40), noise=0.1 * rank))  # not random on rank 0
    with make_private(optimizer=optimizer, rank_timeout=60.0, **given) as private:
        jobs.train(model, private, 2)
        return private.steps


def test_random_records_are_not_compared(ranks: World) -> None:
    assert ranks.run(with_random_records) == [2, 2]


def uneven(rank: int) -> int:
    """Rank 1 takes a step less than rank 0."""
    model = jobs.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with make_private(optimizer=optimizer, rank_timeout=60.0, **run_with(model)) as private:
        jobs.train(model, private, 3 - rank)
        return private.steps


def test_training_loops_that_differ_are_reported(ranks: World) -> None:
    found = ranks.outcomes(uneven)
    for result, error in found:
        assert result is None and "the training loops of the ranks differ" in (error or ""), found


CHANGES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "clamped": (lambda model: [nn.utils.clip_grad_value_(p, 1e-3) for p in model.parameters()], "already clipped"),
    "scaled": (lambda model: [p.grad.mul_(0.5) for p in model.parameters() if p.grad is not None], "already clipped"),
    "negated": (lambda model: [p.grad.neg_() for p in model.parameters() if p.grad is not None], "did not write"),
    "added": (lambda model: jobs.losses_of(model, jobs.data()[:4]).mean().backward(), "did not write"),
    "zero": (lambda model: [p.grad.zero_() for p in model.parameters() if p.grad is not None], "cleared before"),
}


def changed(rank: int, layout: str) -> dict[str, list[str]]:
    """The warnings about gradients that were changed after the release."""
    found = {}
    for name, (change, _) in CHANGES.items():
        model = jobs.laid_out(jobs.network(), layout)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        private = make_private(optimizer=optimizer, rank_timeout=10.0, **run_with(model, **jobs.needs(layout)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", PrivacyWarning)
            for x, y in private.loader.pieces():
                if private.backward(jobs.losses_of(model, (x, y)) if len(x) else None):
                    break
            change(model)
            optimizer.step()
        found[name] = [str(warning.message) for warning in caught if warning.category is PrivacyWarning]
    return found


@pytest.mark.parametrize("layout", ["plain", "fsdp", "tensor"])
def test_released_gradients_that_were_changed_are_warned_of(ranks: World, layout: str) -> None:
    for found in ranks.run(changed, layout):
        for name, (_, expected) in CHANGES.items():
            assert len(found[name]) == 1 and expected in found[name][0], (name, found[name])


def doubled(rank: int, layout: str) -> None:
    """Change the weights as an optimizer does that works on lists of tensors."""
    model = jobs.laid_out(jobs.network(), layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = make_private(optimizer=optimizer, rank_timeout=10.0, **run_with(model, **jobs.needs(layout)))
    jobs.train(model, private, 1)
    with torch.no_grad():
        for p in model.parameters():
            torch._foreach_mul_([p], 2.0)
    with pytest.raises(StepError, match="is not what the last release"):
        private.spent()


@pytest.mark.parametrize("layout", ["plain", "fsdp", "tensor"])
def test_changed_weights_are_found_on_every_rank(ranks: World, layout: str) -> None:
    ranks.run(doubled, layout)


def exhausted(rank: int) -> tuple[int, str, str]:
    model = jobs.network()
    options = run_with(model, noise_multiplier=None, epsilon=2.0, delta=1e-3, steps=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with make_private(optimizer=optimizer, rank_timeout=60.0, **options) as private:
        try:
            jobs.train(model, private, 100)
        except Exception as error:
            return private.steps, type(error).__name__, str(private.statement())
    return 0, "", ""


def test_the_budget_ends_the_run_on_every_rank(ranks: World) -> None:
    first, second = ranks.run(exhausted)
    assert first == second
    assert first[0] >= 5 and first[1] == "BudgetExhausted"


def two_ranks(rank: int) -> int:
    return dist.get_world_size()


def test_the_ranks_are_usable_after_all_refusals(ranks: World) -> None:
    assert ranks.run(two_ranks) == [2, 2]
    assert jobs.close_to(ranks.run(jobs.trained)[1]["parameters"], jobs.trained(0)["parameters"])
