"""Loops with `accelerator.backward`, equal to the plain clipwise loop."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import clipwise
from tests.distributed.world import World, world
from tests.runs import data, network, sgd

pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from clipwise.integrations.accelerate import MeanLossLoader, make_private

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]


ORDERS = ("before", "after")
OPTIONS: list[dict[str, Any]] = [{}, {"max_physical_batch_size": 3}]


def trained(order: str, batch_size: int = 8, **options: Any) -> tuple[torch.nn.Module, MeanLossLoader]:
    """A loop of a user of accelerate. The model has a buffer, as most models do."""
    accelerator = Accelerator(cpu=True)
    model: Any = network()
    model.register_buffer("version", torch.ones(1))
    inner, optimizer = model, sgd(model)
    if order == "before":
        model, optimizer = accelerator.prepare(model, optimizer)
    loader = make_private(
        accelerator, model, optimizer, DataLoader(data(), batch_size, shuffle=True), noise_multiplier=1.0, seed=3,
        **options,
    )  # fmt: skip
    if order == "after":
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
    assert loader.private.steps == 5
    return inner, loader


def trained_plainly() -> tuple[torch.nn.Module, clipwise.Private]:
    model = network()
    private = clipwise.make_private(model, sgd(model), data(), batch_size=8, noise_multiplier=1.0, seed=3)
    for x, y in private.loader:
        private.step(F.cross_entropy(model(x), y, reduction="none") if len(x) else None)
    return model, private


@pytest.mark.parametrize("options", OPTIONS, ids=["whole", "pieces"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_prepared_loop_equals_the_plain_loop(order: str, options: dict[str, Any]) -> None:
    model, loader = trained(order, **options)
    other, private = trained_plainly()
    assert str(loader.private.statement()) == str(private.statement())
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def two() -> Iterator[World]:
    with world(2) as started:
        yield started


def on_rank(rank: int, order: str, options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], str]:
    os.environ |= {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
    os.environ |= {name: "2" for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    model, loader = trained(order, batch_size=4, **options)
    assert isinstance(Accelerator(cpu=True).prepare(network()), torch.nn.parallel.DistributedDataParallel)
    return dict(model.named_parameters()), str(loader.private.statement())


@pytest.mark.parametrize("options", OPTIONS, ids=["whole", "pieces"])
@pytest.mark.parametrize("order", ORDERS)
def test_two_processes_train_the_model_of_one(two: World, order: str, options: dict[str, Any]) -> None:
    """Each with half the batch size in its data loader, as with accelerate."""
    other, private = trained_plainly()
    for found, statement in two.run(on_rank, order, options):
        assert statement == str(private.statement())
        for name, p in other.named_parameters():
            torch.testing.assert_close(found[name], p, rtol=1e-4, atol=1e-5)


def test_gradient_accumulation_is_refused() -> None:
    model = network()
    with pytest.raises(clipwise.ConfigurationError, match="gradient_accumulation_steps"):
        make_private(Accelerator(cpu=True, gradient_accumulation_steps=2), model, sgd(model), DataLoader(data(), 8))


@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
def test_clipping_by_accelerate_is_refused_for_the_private_model(name: str) -> None:
    accelerator, model, other = Accelerator(cpu=True), network(), network()
    make_private(accelerator, model, sgd(model), DataLoader(data(), 8), noise_multiplier=1.0)
    F.cross_entropy(other(data()[:8][0]), data()[:8][1]).backward()
    getattr(accelerator, name)(other.parameters(), 1.0)
    with pytest.raises(clipwise.ConfigurationError, match=rf"accelerator\.{name} would clip the noised mean"):
        getattr(accelerator, name)(model.parameters(), 1.0)


def test_the_loader_of_the_run_is_not_skipped() -> None:
    accelerator, model = Accelerator(cpu=True), network()
    loader = make_private(accelerator, model, sgd(model), DataLoader(data(), 8), noise_multiplier=1.0)
    assert len(accelerator.skip_first_batches(DataLoader(data(), 8), 2)) == 3
    with pytest.raises(clipwise.ConfigurationError, match="skip_first_batches"):
        accelerator.skip_first_batches(loader, 2)


def test_a_saved_state_continues_the_run(tmp_path: Path) -> None:
    def begun() -> tuple[Accelerator, Any, Any, Any]:
        accelerator, model = Accelerator(cpu=True), network()
        model, optimizer = accelerator.prepare(model, sgd(model))
        loader = make_private(
            accelerator, model, optimizer, DataLoader(data(), 8), noise_multiplier=1.0, seed=3,
            ledger=tmp_path / "ledger",
        )  # fmt: skip
        accelerator.register_for_checkpointing(loader.private)
        return accelerator, model, optimizer, loader

    def epoch(accelerator: Accelerator, model: Any, optimizer: Any, loader: MeanLossLoader) -> None:
        for x, y in loader:
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()

    run = begun()
    epoch(*run)
    run[0].save_state(str(tmp_path / "saved"))
    run[3].private.close()
    run = begun()
    with warnings.catch_warnings():
        warnings.simplefilter("error", clipwise.PrivacyWarning)  # such as one about a fresh secret
        run[0].load_state(str(tmp_path / "saved"))
        epoch(*run)
    assert run[3].private.spent(delta=1e-3).steps == 10
    run[3].private.statement()


def test_bf16_trains() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator, model = Accelerator(cpu=True, mixed_precision="bf16"), network()
    try:
        loader = make_private(accelerator, model, sgd(model), DataLoader(data(), 8), noise_multiplier=1.0)
        prepared, optimizer = accelerator.prepare(model, loader.private.optimizer)
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(prepared(x), y))
            optimizer.step()
        assert loader.private.steps == 5
        loader.private.statement()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def refuse_fsdp() -> None:
    accelerator, model = Accelerator(cpu=True), network()
    kind, accelerator.state.distributed_type = accelerator.state.distributed_type, DistributedType.FSDP
    try:
        make_private(accelerator, model, sgd(model), DataLoader(data(), 8))
    finally:
        accelerator.state.distributed_type = kind


def test_sharding_by_accelerate_is_refused() -> None:
    with pytest.raises(clipwise.ConfigurationError, match=r"FSDP.*data parallelism"):
        refuse_fsdp()


def test_loss_scaling_is_refused() -> None:
    accelerator, model = Accelerator(cpu=True), network()
    accelerator.scaler = torch.amp.GradScaler("cpu")  # as with mixed_precision="fp16" on a GPU
    with pytest.raises(clipwise.ConfigurationError, match=r"fp16.*bf16"):
        make_private(accelerator, model, sgd(model), DataLoader(data(), 8))


def test_a_prepared_loader_is_refused() -> None:
    accelerator, model = Accelerator(cpu=True), network()
    with pytest.raises(clipwise.ConfigurationError, match=r"leave it out of accelerator\.prepare"):
        make_private(accelerator, model, sgd(model), accelerator.prepare(DataLoader(data(), 8)))


def test_a_loader_with_drop_last_is_refused() -> None:
    model = network()
    with pytest.raises(clipwise.ConfigurationError, match="drop_last"):
        make_private(Accelerator(cpu=True), model, sgd(model), DataLoader(data(), 8, drop_last=True))
