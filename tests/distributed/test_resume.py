"""A run continues on another number of ranks from a checkpoint of torch.distributed.checkpoint."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clipwise import PerExample, distributed, make_private
from tests.distributed import jobs
from tests.distributed.world import World, world

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def two() -> Iterator[World]:
    with world(2) as started:
        yield started


@pytest.fixture(scope="module")
def four() -> Iterator[World]:
    with world(4) as started:
        yield started


def leg(rank: int, folder: Path, layout: str, steps: int, number: int) -> dict[str, Any]:
    """Train some steps from checkpoint `number`, and write the next one."""
    model = jobs.laid_out(jobs.network(seed=number), layout)  # other initial weights: all come from the checkpoint
    private = make_private(
        model,
        jobs.optimizer_of("adam", model),
        jobs.data(),
        batch_size=8,
        noise_multiplier=1.0,
        clipping=PerExample(max_norm=1.0),
        seed=1,
        ledger=folder / "run.ledger",
        rank_timeout=60.0,
    )
    with private:
        if number:
            distributed.load(folder / f"checkpoint-{number}", model, private)
        jobs.train(model, private, steps)
        distributed.save(folder / f"checkpoint-{number + 1}", model, private)
        return {"parameters": jobs.whole(model), "steps": private.steps, "statement": str(private.statement())}


def uninterrupted(steps: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = jobs.trained(0, steps=steps, optimizer="adam")["parameters"]
    return found


@pytest.mark.parametrize("layout", ["plain", "fsdp"])
def test_2_then_4_then_1_ranks_train_the_model_of_one(two: World, four: World, tmp_path: Path, layout: str) -> None:
    on_2 = two.run(leg, tmp_path, layout, 3, 0)[0]
    secret = tmp_path / "run.ledger.resume"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    on_4 = four.run(leg, tmp_path, layout, 3, 1)[0]
    on_1 = leg(0, tmp_path, "plain", 2, 2)
    assert [found["steps"] for found in (on_2, on_4, on_1)] == [3, 6, 8]
    assert jobs.close_to(on_2["parameters"], uninterrupted(3))
    assert jobs.close_to(on_4["parameters"], uninterrupted(6))
    assert jobs.close_to(on_1["parameters"], uninterrupted(8))
    key = json.loads(secret.read_text())["key"]
    for file in tmp_path.rglob("*"):
        if file.is_file() and file != secret:
            content = file.read_bytes()
            assert key.encode() not in content and bytes.fromhex(key) not in content


def test_another_sequence_than_the_resume_file_takes_a_fresh_secret(two: World, tmp_path: Path) -> None:
    two.run(leg, tmp_path, "fsdp", 3, 0)
    (tmp_path / "run.ledger.resume").unlink()
    found = two.run(leg, tmp_path, "fsdp", 3, 1)[0]
    assert found["steps"] == 6
    assert not jobs.close_to(found["parameters"], uninterrupted(6))
    assert all(torch.isfinite(t).all() for t in found["parameters"].values())
