"""A model split by `parallelize_module` trains as in a single process, and each record is bounded over all shards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.data import TensorDataset

from clipwise import PerExample, Quantile, augment, distributed, make_private
from clipwise.distributed.tensor_parallel import is_split
from clipwise.errors import StepError
from clipwise.gradients.real_views import own_part
from tests.distributed import jobs
from tests.distributed.test_noise import require_standard, require_uncorrelated
from tests.distributed.world import World, world

pytestmark = pytest.mark.integration

STRATEGIES: dict[str, PerExample] = {
    "flat": PerExample(max_norm=1.0),
    "layer": PerExample(max_norm=1.0, parts="layer"),
    "normalize": PerExample(max_norm=0.5, mode="normalize"),
    "quantile": PerExample(max_norm=Quantile(count_noise=0.5)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "poisson": {},
    "fixed-size": {"sampling": "fixed-size"},
    "rare": {"batch_size": None, "sample_rate": 0.03},
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


class Network(nn.Module):
    """Layers that are split by columns and by rows, one that is not split, and normalization between them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(jobs.FEATURES, 6), nn.Linear(6, 4)
        self.norm, self.head, self.drop = nn.LayerNorm(4), nn.Linear(4, jobs.CLASSES), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.down(torch.tanh(self.up(x)))
        return self.head(self.drop(torch.tanh(self.norm(h))))  # type: ignore[no-any-return]


def network(dropout: float = 0.0) -> Network:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Network(dropout)


def split(model: nn.Module, replicas: int) -> nn.Module:
    shape = (replicas, dist.get_world_size() // replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "tensor"))["tensor"]
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def trained(
    rank: int, replicas: int, strategy: str, steps: int = 3, optimizer: str = "sgd", **options: Any
) -> dict[str, Any]:
    """Parameters, statement and averages; `replicas` is 0 for a single process."""
    torch.manual_seed(100 + rank)  # nothing may depend on it
    model: nn.Module = network()
    if replicas:
        model = split(model, replicas)
    arguments: dict[str, Any] = {"batch_size": 8, "noise_multiplier": 1.0, "seed": 1, "probe_independence": False}
    if replicas:
        arguments["rank_timeout"] = 60.0
    with make_private(
        model,
        jobs.optimizer_of(optimizer, model),
        jobs.data(),
        clipping=STRATEGIES[strategy],
        max_physical_batch_size=1,
        **(arguments | options),
    ) as private:
        jobs.train(model, private, steps)
        found = {"parameters": jobs.whole(model), "statement": str(private.statement()), "steps": private.steps}
        if "ema" in options:
            with private.ema.applied():
                found["averages"] = jobs.whole(model)
        return found


def run(rank: int, replicas: int, strategy: str, options: dict[str, Any]) -> dict[str, Any]:
    return trained(rank, replicas, strategy, **options)


def compare(ranks: World, replicas: int, strategy: str, options: dict[str, Any]) -> None:
    alone = run(0, 0, strategy, options)
    for found in ranks.run(run, replicas, strategy, options):
        assert jobs.close_to(found["parameters"], alone["parameters"])
        assert found["statement"] == alone["statement"]
        assert found["steps"] == alone["steps"]
        if "averages" in alone:
            assert jobs.close_to(found["averages"], alone["averages"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_kind_of_clipping_trains_the_model_of_one_process(ranks: World, strategy: str) -> None:
    compare(ranks, 1, strategy, {})


@pytest.mark.parametrize("option", [name for name in OPTIONS if name != "poisson"])
def test_every_option_trains_the_model_of_one_process(ranks: World, option: str) -> None:
    if option == "secure":
        pytest.importorskip("cryptography")
    compare(ranks, 1, "flat", OPTIONS[option])


@pytest.mark.parametrize("strategy", ["flat", "quantile"])
def test_replicas_of_split_models_share_the_batch(four: World, strategy: str) -> None:
    compare(four, 2, strategy, {"optimizer": "adam"})
    compare(four, 2, strategy, OPTIONS["rare"])  # some replicas have no records


def with_dropout(rank: int, replicas: int) -> dict[str, Tensor]:
    torch.manual_seed(rank)
    model: nn.Module = network(dropout=0.5)
    model = split(model, replicas) if replicas else model
    with make_private(
        model,
        jobs.optimizer_of("sgd", model),
        jobs.data(),
        batch_size=8,
        noise_multiplier=1.0,
        seed=1,
        clipping=PerExample(max_norm=1.0),
        max_physical_batch_size=1,
        probe_independence=False,
    ) as private:
        for x, y in private.loader.pieces():
            with private.randomness():
                losses = jobs.losses_of(model, (x, y)) if len(x) else None
            private.step(losses)
    return jobs.whole(model)


def test_random_layers_are_alike_on_the_ranks_of_a_group(ranks: World) -> None:
    alone = with_dropout(0, 0)
    assert all(jobs.close_to(found, alone) for found in ranks.run(with_dropout, 1))


class Sequences(nn.Module):
    """Positions in dimension 1, over which sequence parallelism splits the input of the normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(5), nn.Linear(5, 6), nn.Linear(6, jobs.CLASSES)

    def forward(self, x_BTd: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x_BTd)))).mean(1)  # type: ignore[no-any-return]


def on_sequences(rank: int, is_split: bool) -> dict[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = Sequences()
    if is_split:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        plan = {"norm": SequenceParallel(use_local_output=True), "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel()}  # fmt: skip
        model = parallelize_module(model, mesh, plan)
    random = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(20, 4, 5, generator=random), torch.arange(20) % jobs.CLASSES)
    with make_private(
        model, jobs.optimizer_of("sgd", model), data, batch_size=6, noise_multiplier=1.0, seed=1,
        clipping=PerExample(max_norm=0.5), max_physical_batch_size=1, probe_independence=False,
    ) as private:  # fmt: skip
        jobs.train(model, private, 3)
        return jobs.whole(model)


def test_gradients_that_are_partial_sums_on_each_rank_are_added(ranks: World) -> None:
    alone = on_sequences(0, False)
    assert all(jobs.close_to(found, alone) for found in ranks.run(on_sequences, True))


def contribution(rank: int, scale: float) -> tuple[float, list[bytes]]:
    """The squared norm of what this rank adds to the sum of one record, and the bytes of the gradients of copies."""
    torch.manual_seed(rank)  # so that dropout, and with it the copies, differ between the ranks
    model = split(network(dropout=0.5), 1)
    x, y = jobs.data(1).tensors
    with make_private(
        model,
        jobs.optimizer_of("sgd", model),
        TensorDataset(x * scale, y),
        sampling="full",
        noise_multiplier=1.0,
        clipping=PerExample(max_norm=0.5),
        max_physical_batch_size=1,
        rank_timeout=60.0,
    ) as private:
        layout = private._context.layout
        reduced = layout.reduced
        squares: list[float] = []

        def measured(total: dict[str, Tensor]) -> dict[str, Tensor]:
            found = reduced(total)
            shards = {name for name, p in layout.stored.items() if is_split(p)}
            squares.extend(float(t.double().square().sum()) for n, t in found.items() if n in shards or rank == 0)
            return found

        layout.reduced = measured  # type: ignore[method-assign]
        for batch in private.loader.pieces():
            assert private.backward(jobs.losses_of(model, batch))
        copies = [p.grad for p in model.parameters() if not is_split(p)]
        return sum(squares), [own_part(g).numpy().tobytes() for g in copies if g is not None]


@pytest.mark.parametrize("scale", [0.01, 1.0, 1000.0])
def test_a_record_is_bounded_over_all_shards_even_if_the_ranks_disagree(ranks: World, scale: float) -> None:
    found = ranks.run(contribution, scale)
    norm = math.sqrt(sum(square for square, _ in found))
    assert 0 < norm <= 0.5 * (1 + 1e-6)
    assert all(copies == found[0][1] for _, copies in found)  # no noise can be subtracted


def releases(rank: int, replicas: int) -> tuple[Tensor, Tensor]:
    """[steps, entries] of noise in standard deviations: of the whole model, and of the shards on this rank."""
    model = split(network(), replicas)
    everything, own = [], []
    with make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        jobs.data(),
        sample_rate=1e-9,  # so every batch is empty, and a release is noise alone
        noise_multiplier=1.5,
        clipping=PerExample(max_norm=0.5),
        max_physical_batch_size=1,
        rank_timeout=60.0,
    ) as private:
        for _ in range(60):
            next(iter(private.loader.pieces()))
            assert private.backward(None)
            grads = {p: p.grad for p in model.parameters() if p.grad is not None}
            whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads.values()]
            everything.append(torch.cat([g.flatten() for g in whole]))
            own.append(torch.cat([own_part(g).flatten() for p, g in grads.items() if is_split(p)]))
            private.optimizer.step()
    std = 0.5 * 1.5 / (1e-9 * 40)
    return torch.stack(everything).double() / std, torch.stack(own).double() / std


@pytest.mark.parametrize("replicas", [1, 2])
def test_noise_has_the_declared_variance_and_no_correlation(ranks: World, four: World, replicas: int) -> None:
    found = (ranks if replicas == 1 else four).run(releases, replicas)
    whole = found[0][0]
    assert all(torch.equal(other, whole) for other, _ in found)
    require_standard(whole)
    for before, after in pairwise(whole):
        require_uncorrelated(before, after)
    require_uncorrelated(whole[:, :-1], whole[:, 1:])
    require_uncorrelated(found[0][1], found[1][1])  # two shards
    if replicas == 2:
        assert torch.equal(found[0][1], found[2][1])  # the same shards in two replicas


def leg(rank: int, folder: Path, steps: int, number: int, is_split_model: bool) -> dict[str, Any]:
    """Train some steps from checkpoint `number`, and write the next one."""
    model: nn.Module = split(network(), 1) if is_split_model else network()
    with make_private(
        model,
        jobs.optimizer_of("adam", model),
        jobs.data(),
        batch_size=8,
        noise_multiplier=1.0,
        clipping=PerExample(max_norm=1.0),
        seed=1,
        max_physical_batch_size=1,
        probe_independence=False,
        ledger=folder / "run.ledger",
    ) as private:
        if number:
            distributed.load(folder / f"checkpoint-{number}", model, private)
        jobs.train(model, private, steps)
        distributed.save(folder / f"checkpoint-{number + 1}", model, private)
        return {"parameters": jobs.whole(model), "steps": private.steps}


def test_a_run_continues_with_another_split(ranks: World, four: World, tmp_path: Path) -> None:
    on_2 = ranks.run(leg, tmp_path, 2, 0, True)[0]
    on_4 = four.run(leg, tmp_path, 2, 1, False)[0]  # not split
    on_1 = leg(0, tmp_path, 2, 2, False)
    assert [found["steps"] for found in (on_2, on_4, on_1)] == [2, 4, 6]
    alone = trained(0, 0, "flat", steps=6, optimizer="adam")
    assert jobs.close_to(on_1["parameters"], alone["parameters"])


def several_records(rank: int) -> str:
    model = split(network(), 1)
    with make_private(
        model,
        jobs.optimizer_of("sgd", model),
        jobs.data(),
        sampling="full",
        noise_multiplier=1.0,
        clipping=PerExample(max_norm=0.5),
        max_physical_batch_size=1,
        rank_timeout=60.0,
    ) as private:
        try:
            next(iter(private.loader.pieces(4)))
        except StepError as error:
            return str(error)
    return ""


def test_a_piece_with_several_records_is_refused(ranks: World) -> None:
    assert all("one record in each forward pass" in text for text in ranks.run(several_records))
